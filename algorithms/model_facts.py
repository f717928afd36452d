"""What a model's own small files say of it: its configuration and the shapes of its weights.

Nothing here loads a weight or a compute library. A model is a folder, or a hub name of which the
files that are in the local cache are read; only `read_config` fetches one, of some kilobytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backends.errors import Problem, UserError

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each weight, by name."""

INDEX = "model.safetensors.index.json"


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

    https://huggingface.co/docs/safetensors: 8 bytes with the size of a JSON header, then that.
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
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        shapes |= {
            key: tuple(entry["shape"]) for key, entry in header.items() if key != "__metadata__"
        }
    return shapes
