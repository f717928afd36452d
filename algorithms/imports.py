"""A user's own code: by its name, `module:attribute`, and where in it something went wrong."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from backends.registry import import_error

_OURS = {"algorithms", "backends", "flows", "tasks"}
_INSTALLED = tuple(
    sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


def import_modules(names: Any) -> bool:
    """Import modules by name; whether any was not imported before.

    Names that are no list of strings are left to whoever checks the document. Raises ValueError as
    `import_path` does.
    """
    wanted = names if isinstance(names, list) else []
    new = [name for name in wanted if isinstance(name, str) and name not in sys.modules]
    for name in new:
        _import(name)
    return bool(new)


def import_path(path: str) -> Any:
    """What stands behind `module:attribute`; modules of the working directory are found too.

    Raises ValueError, with the remedy, if it cannot be had.
    """
    name, colon, attribute = path.partition(":")
    if not (colon and name and attribute):
        raise ValueError(f"{path!r} is not module:attribute, as in my_rewards:is_polite")
    module = _import(name)
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ValueError(f"{name} has no {attribute!r}: define it there") from None


def _import(name: str) -> ModuleType:
    if (here := str(Path.cwd())) not in sys.path and "" not in sys.path:
        sys.path.append(here)  # behind all others, so that it hides nothing
    if name.endswith(".py") or "/" in name:
        module = ".".join(Path(name.removesuffix(".py")).parts)
        raise ValueError(f"{name!r} is a file, and a module is wanted: write {module}")
    try:
        return import_module(name)
    except (Exception, SystemExit) as error:  # a script that exits is no end of ours
        looked = f" (looked in {here} too)" if isinstance(error, ModuleNotFoundError) else ""
        raise ValueError(f"{name} does not import: {import_error(error)}{looked}") from error


def raised(error: BaseException, by: type | Callable[..., Any]) -> str:
    """What a class or function raised, and the innermost line that is a user's and no library's.

    As in `KeyError: 'here' (my_losses.py, line 12)`; without a line if none of theirs was come to.
    """
    own = _package(by.__module__ or "")  # an installed plug-in is its user's too
    walked = traceback.walk_tb(error.__traceback__)
    theirs = [(frame, line) for frame, line in walked if _is_theirs(frame, own)]
    words = f"{type(error).__name__}: {error}"
    if not theirs:
        return words
    frame, line = theirs[-1]
    return f"{words} ({Path(frame.f_code.co_filename).name}, line {line})"


def _is_theirs(frame: FrameType, own: str) -> bool:
    package, file = _package(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
    if package in _OURS:
        return False
    return package == own or not file.startswith(("<", *_INSTALLED))


def _package(module: str) -> str:
    return module.partition(".")[0]
