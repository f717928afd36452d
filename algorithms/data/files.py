"""The files that a `data:` section names: folders, object stores, patterns, compressed or not."""

from __future__ import annotations

import contextlib
import difflib
import glob
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from backends.errors import Problem, UserError

WILD = frozenset("*?[")


def matching_files(paths: Sequence[str], where: str) -> list[str]:
    """The files in the order they are given; those that a pattern matches, in the order of names.

    Raises UserError for a pattern that matches none; a plain path is found missing when it is read.
    """
    found: list[str] = []
    for path in paths:
        if not WILD & set(path) or ("://" not in path and Path(path).expanduser().exists()):
            found.append(path)
        elif matches := _matches(path, where):
            found.extend(matches)
        else:
            what = f"no file matches {path}"
            raise UserError(Problem(where, what, _where_we_looked(path)))
    return found


def _matches(pattern: str, where: str) -> list[str]:
    if "://" not in pattern:
        names = glob.glob(str(Path(pattern).expanduser()), recursive=True)  # noqa: PTH207
        return sorted(name for name in names if Path(name).is_file())
    with _told(pattern, where):
        from fsspec.core import url_to_fs

        files, rest = url_to_fs(pattern)
        details = files.glob(rest, detail=True)
        names = [name for name, info in details.items() if info["type"] == "file"]
    return sorted(str(files.unstrip_protocol(name)) for name in names)


@contextlib.contextmanager
def opened(path: str, where: str) -> Iterator[IO[bytes]]:
    """The content of a file, uncompressed if its name ends as that of a compressed one.

    Raises UserError for what goes wrong with the file, at the opening and in the reading.
    """
    with _told(path, where):
        import fsspec

        local = path if "://" in path else str(Path(path).expanduser())
        with fsspec.open(local, "rb", compression="infer") as file:
            yield file


@contextlib.contextmanager
def _told(path: str, where: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(Problem(where, f"there is no file {path}", nearest_file(path))) from None
    except IsADirectoryError:
        raise UserError(
            Problem(where, f"{path} is a folder", f"name its files: {path.rstrip('/')}/*")
        ) from None
    except Exception as error:
        words = " ".join(str(error).split()) or type(error).__name__
        remedy = _where_we_looked(path) if "://" in path else "give a readable file"
        raise UserError(Problem(where, f"{path} cannot be read ({words})", remedy)) from error


def nearest_file(path: str) -> str:
    """The remedy for a file that is not there: one of a similar name, or where we looked."""
    folder = Path(path).expanduser().parent
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    near = difflib.get_close_matches(Path(path).name, names, n=1)
    if near:
        return f"did you mean {folder / near[0]}?"
    return _where_we_looked(path)


def _where_we_looked(path: str) -> str:
    if "://" in path:
        return "check the address and the credentials"
    return f"paths are relative to the working directory, {Path.cwd()}"
