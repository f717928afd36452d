"""A training state on disk without pickle: tensors as safetensors, everything else as JSON.

`pack` takes trees of what optimizers, schedulers and random generators give out: dicts with any
keys, lists, tuples, numbers, strings, tensors and numpy arrays. `unpack` gives the same back to the
last bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

TENSORS = "training.safetensors"
TREE = "training.json"


def pack(tree: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """The tensors of a tree by name, and the tree as JSON that names them. Raises TypeError."""
    import torch

    tensors: dict[str, torch.Tensor] = {}

    def walk(node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            name = f"{len(tensors):06d}"
            tensors[name] = node.detach().cpu().clone().contiguous()
            return {"tensor": name}
        if isinstance(node, np.ndarray):
            return {"array": node.tolist(), "dtype": str(node.dtype)}
        if isinstance(node, dict):
            return {"pairs": [[walk(key), walk(value)] for key, value in node.items()]}
        if isinstance(node, list | tuple):
            return {type(node).__name__: [walk(item) for item in node]}
        if node is None or isinstance(node, bool | int | float | str):
            return node
        raise TypeError(f"a training state cannot hold a {type(node).__name__}")

    packed = walk(tree)
    return tensors, packed


def unpack(tensors: dict[str, torch.Tensor], packed: Any) -> Any:
    """The tree that `pack` took."""
    if not isinstance(packed, dict):
        return packed
    (kind, value), *rest = packed.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "array":
        return np.array(value, dtype=dict(rest)["dtype"])
    if kind == "pairs":
        return {unpack(tensors, key): unpack(tensors, item) for key, item in value}
    items = [unpack(tensors, item) for item in value]
    return tuple(items) if kind == "tuple" else items


def write_state(folder: Path, tree: Any) -> None:
    """Write a training state into a folder."""
    from safetensors.torch import save_file

    tensors, packed = pack(tree)
    save_file(tensors, folder / TENSORS)
    (folder / TREE).write_text(json.dumps(packed), encoding="utf-8")


def read_state(folder: Path) -> Any:
    """The training state that `write_state` left in a folder; None if there is none."""
    from safetensors.torch import load_file

    if not (folder / TREE).is_file():
        return None
    packed = json.loads((folder / TREE).read_text(encoding="utf-8"))
    return unpack(load_file(folder / TENSORS), packed)
