"""The sole list of algorithms, and of callbacks: built in, from plug-ins, or registered here.

    @register_algorithm("focal_sft")
    class FocalSFT(SFT): ...

makes `algorithm: {kind: focal_sft}` valid in this process; an experiment names the module that does
so under `imports`, and a package does the same for everyone with an entry point in the group
`flowtune.algorithms`. The other kinds have decorators like it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel

from algorithms.base import BaseAlgorithm, BaseAlgorithmConfig
from algorithms.callbacks import Callback
from algorithms.data.dataset import DATA_SOURCES
from algorithms.data.transforms import TRANSFORMS
from algorithms.rewards.verifiers import VERIFIERS
from algorithms.rollouts.environment import ENVIRONMENTS
from backends.registry import BACKENDS, Registry, misplaced

T = TypeVar("T", bound=type)

ALGORITHMS: Registry[type[BaseAlgorithm]] = Registry(
    "algorithm",
    "flowtune.algorithms",
    {
        "sft": "algorithms.sft:SFT",
        "rl": "algorithms.rl:RL",
        "sdft": "algorithms.sdft:SDFT",
        "distill": "algorithms.distill:Distill",
        "dpo": "algorithms.dpo:DPO",
        "mock_sft": "algorithms.mock_sft:MockSFT",
        "local_sft": "algorithms.local_sft:LocalSFT",
        "local_dpo": "algorithms.local_dpo:LocalDPO",
        "local_rl": "algorithms.local_rl:LocalRL",
    },
    config=("Config", BaseAlgorithmConfig),
    bases=(BaseAlgorithm,),
)

CALLBACKS: Registry[type[Callback]] = Registry(
    "callback",
    "flowtune.callbacks",
    {
        "early_stopping": "algorithms.watchers.early_stopping:EarlyStopping",
        "samples": "algorithms.watchers.samples:Samples",
        "csv": "algorithms.watchers.tables:CsvTables",
        "tensorboard": "algorithms.watchers.tensorboard:TensorBoard",
        "wandb": "algorithms.watchers.wandb:WandB",
        "mlflow": "algorithms.watchers.mlflow:MLflow",
        "trackio": "algorithms.watchers.trackio:Trackio",
    },
    config=("Config", BaseModel),
    bases=(Callback,),
)

REGISTRIES: dict[str, Registry[Any]] = {
    "algorithms": ALGORITHMS,
    "backends": BACKENDS,
    "data": DATA_SOURCES,
    "transforms": TRANSFORMS,
    "verifiers": VERIFIERS,
    "environments": ENVIRONMENTS,
    "callbacks": CALLBACKS,
}


def _registering(registry: Registry[Any]) -> Callable[[str], Callable[[T], T]]:
    def register(kind: str) -> Callable[[T], T]:
        """Class decorator: make the class known to this process under `kind`.

        What it decorates is refused with a TypeError if it lacks a part.
        """
        if isinstance(kind, type):  # the decorator without its parentheses
            example = f'@register_{registry.what}("my_{registry.what}")'
            raise TypeError(f"{kind.__name__} lacks its name: write {example} above it")

        def decorate(item: T) -> T:
            registry.register(kind, item)
            return item

        return decorate

    return register


register_algorithm = _registering(ALGORITHMS)
register_verifier = _registering(VERIFIERS)
register_environment = _registering(ENVIRONMENTS)
register_callback = _registering(CALLBACKS)
register_transform = _registering(TRANSFORMS)


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
    for name, error in misplaced(registry.group for registry in REGISTRIES.values()).items():
        lines.append(Listing("plug-ins", name, "", "", error))
    return lines
