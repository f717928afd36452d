"""The sole list of algorithms, and of callbacks: built in, from plug-ins, or registered here.

    @register_algorithm("focal_sft")
    class FocalSFT(SFT): ...

makes `algorithm: {kind: focal_sft}` valid in this process; a package does the same for everyone
with an entry point in the group `flowtune.algorithms`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel

from algorithms.base import BaseAlgorithm, BaseAlgorithmConfig
from algorithms.callbacks import Callback
from algorithms.data.dataset import DATA_SOURCES
from algorithms.rewards.verifiers import VERIFIERS
from backends.registry import BACKENDS, Registry

A = TypeVar("A", bound=type[BaseAlgorithm])

ALGORITHMS: Registry[type[BaseAlgorithm]] = Registry(
    "algorithm",
    "flowtune.algorithms",
    {"sft": "algorithms.sft:SFT", "mock_sft": "algorithms.mock_sft:MockSFT"},
    config=("Config", BaseAlgorithmConfig),
)

CALLBACKS: Registry[type[Callback]] = Registry(
    "callback", "flowtune.callbacks", {}, config=("Config", BaseModel)
)

REGISTRIES: dict[str, Registry[Any]] = {
    "algorithms": ALGORITHMS,
    "backends": BACKENDS,
    "data": DATA_SOURCES,
    "verifiers": VERIFIERS,
    "callbacks": CALLBACKS,
}


def register_algorithm(kind: str) -> Callable[[A], A]:
    """Class decorator: make an algorithm known to this process under `kind`."""

    def register(algorithm: A) -> A:
        ALGORITHMS.register(kind, algorithm)
        return algorithm

    return register


def algorithm_class(kind: str) -> type[BaseAlgorithm]:
    """The class behind a kind that an experiment names. Raises KeyError for an unknown one."""
    return ALGORITHMS[kind]


@dataclass(frozen=True)
class Listing:
    """A line of `flowtune list`: one kind, or one that does not import and why."""

    group: str
    kind: str
    summary: str
    origin: str
    error: str | None = None


def listings() -> list[Listing]:
    """Everything that can be named in an experiment, and every plug-in that is broken."""
    lines: list[Listing] = []
    for group, registry in REGISTRIES.items():
        for row in sorted(registry.rows().values(), key=lambda row: row.kind):
            lines.append(Listing(group, row.kind, row.summary, row.origin))
        for kind, error in sorted(registry.broken().items()):
            lines.append(Listing(group, kind, "", "", error))
    return lines
