"""What a model's own small files say of it: its configuration and the shapes of its weights.

Nothing here loads a weight or a compute library. A model is a folder, or a hub name of which the
files that are in the local cache are read; only `read_config` fetches one, of some kilobytes.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.base import HUB_NAME
from backends.errors import Problem, UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each weight, by name."""

INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def file_of(model: str, name: str) -> Path | None:
    """A file of a model that is on this machine; None if it is not."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model, name)
    except ValueError:  # no hub name
        return None
    return Path(found) if isinstance(found, str) else None


def read_config(model: str) -> dict[str, Any]:
    """Its config.json; of a hub name that is not in the cache it is fetched.

    Raises UserError if there is none.
    """
    path = file_of(model, "config.json")
    if path is None:
        if Path(model).expanduser().is_dir():
            what, remedy = f"{model} has no config.json", "is this a model's folder?"
            raise UserError(Problem("model", what, remedy))
        path = _fetched(model)
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(Problem("model", f"{path} is no JSON: {error}")) from None
    return config


def _fetched(model: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # it would tell of each try
    try:
        return Path(hf_hub_download(model, "config.json"))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            Problem(
                "model",
                f"there is no folder {model}, and the hub gave no config.json of that name "
                f"({type(error).__name__})",
                "give a model's folder, or a hub name such as Qwen/Qwen3-0.6B",
            )
        ) from None


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the language model, of models that are more than one."""
    inner: Mapping[str, Any] = config.get("text_config") or config
    return inner


def weight_shapes(model: str) -> Shapes | None:
    """The shape of each weight, from the heads of the safetensors files; None if they are not here.

    Raises UserError for a file that is not whole.
    """
    names = ["model.safetensors"]
    if (index := file_of(model, INDEX)) is not None:
        parts: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(parts.values()))
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        path = file_of(model, name)
        if path is None:
            return None
        shapes |= {key: tuple(entry["shape"]) for key, entry in _header(path).items()}
    return shapes


def _header(path: Path) -> dict[str, Any]:
    """What a safetensors file says of each of its tensors. Raises UserError if it is not whole.

    https://huggingface.co/docs/safetensors: 8 bytes with the size of a JSON header, then that, then
    the tensors.
    """
    whole = path.stat().st_size
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        try:
            header: dict[str, Any] = json.loads(file.read(min(size, whole)))
        except ValueError:
            header = {}
    header.pop("__metadata__", None)
    ends = [entry["data_offsets"][1] for entry in header.values()]
    if not ends or 8 + size + max(ends) > whole:
        what, remedy = f"{path} is no whole safetensors file", "download or copy it anew"
        raise UserError(Problem("model.name", what, remedy))
    return header


def read_tokenizer(model: str) -> Tokenizer | None:
    """Its tokenizer.json; None if that is not on this machine. Raises UserError for a bad one."""
    path = file_of(model, "tokenizer.json")
    if path is None:
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no error of its own
        what, remedy = f"is no tokenizer: {error}", "take the model's own file"
        raise UserError(Problem(str(path), what, remedy)) from error


def vocabulary(model: str) -> Mapping[str, int] | None:
    """The number of each token; None if the model's tokenizer.json is not on this machine."""
    tokenizer = read_tokenizer(model)
    return None if tokenizer is None else tokenizer.get_vocab()


# --- what is wrong with it ----------------------------------------------------------------------


def weights_problems(source: str, where: str) -> list[Problem]:
    """What is wrong with a checkpoint's folder; addresses elsewhere are left to who reads them."""
    adapter = Path(source).expanduser() / "adapter_model.safetensors"
    if "://" in source or adapter.is_file():
        return []
    remedy = "give the folder of a checkpoint, as a run's checkpoints/step-… is"
    return [Problem(where, f"there is no {adapter}", remedy)]


def model_problems(name: str, chat: bool, where: str = "model.name") -> list[Problem]:
    """What is wrong with a model's name or the files of its folder; `chat` asks for a template.

    A hub name is left to who loads it. One without an owner (gpt2) may be a folder's too: it is
    that where a folder of almost that name is here.
    """
    folder = Path(name).expanduser()
    if folder.is_file():
        return [Problem(where, f"{name} is a file", "give the model's folder")]
    if not folder.is_dir():
        near = _nearest_folder(folder)
        owner, slash, _ = name.partition("/")
        meant = Path(owner).is_dir() if slash else near is not None  # a folder, wrongly written
        if HUB_NAME.fullmatch(name) and not meant:
            return []
        remedy = _either() if near is None else f"did you mean {near}?"
        if near is not None and not slash:
            remedy += " a hub name has its owner before it, as openai-community/gpt2"
        return [Problem(where, f"there is no folder {name}", remedy)]
    problems = []
    if not (folder / "config.json").is_file():
        problems.append(Problem(where, f"{name} has no config.json", "is this a model's folder?"))
    if not any(folder.glob("*.safetensors")):
        problems.append(
            Problem(
                where,
                f"{name} has no weights",
                "put model.safetensors there; pickled .bin files are not read",
            )
        )
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        problems.append(
            Problem(
                where,
                f"{name} has no tokenizer",
                "put tokenizer.json and tokenizer_config.json there",
            )
        )
    elif chat and not _has_template(folder):
        problems.append(
            Problem(
                where,
                f"the tokenizer of {name} has no chat template, and the data holds chat rows",
                "put a chat_template.jinja there, take an instruct model, or give the rows as "
                "prompt and completion strings",
            )
        )
    return problems


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and bool(config.get("chat_template"))


def _nearest_folder(folder: Path) -> Path | None:
    """A folder beside this one that has almost its name."""
    parent = folder.parent
    names = [entry.name for entry in parent.iterdir() if entry.is_dir()] if parent.is_dir() else []
    near = difflib.get_close_matches(folder.name, names, n=1)
    return parent / near[0] if near else None


def _either() -> str:
    return (
        f"give a folder, relative to the working directory ({Path.cwd()}), or a hub name such as "
        "Qwen/Qwen3-0.6B"
    )
