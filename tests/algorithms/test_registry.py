"""Kinds of one's own: registered in a process, or brought by a plug-in."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel

from algorithms.base import BaseAlgorithm, BaseAlgorithmConfig
from algorithms.check import check_experiment
from algorithms.data.transforms import RowTransform, TransformConfig
from algorithms.experiment import Experiment, parse_experiment
from algorithms.mock_sft import MockSFT
from algorithms.registry import (
    ALGORITHMS,
    REGISTRIES,
    algorithm_class,
    listings,
    register_algorithm,
)
from algorithms.rewards.verifiers import VerifierConfig
from algorithms.rollouts.environment import Environment
from algorithms.sft import SFT, SFTConfig
from backends.errors import UserError
from backends.mock import MockParams
from tests.algorithms.samples import document, experiment, open_backend, train
from tests.algorithms.sampling_algorithm import Sampling

KINDS = sorted(ALGORITHMS.rows())


def of_kind(kind: str, seed: int = 0, **params: Any) -> Experiment:
    small = {"batch_size": 3} | params
    return experiment(
        algorithm={"kind": kind, "params": small}, backend={"kind": "mock"}, seed=seed
    )


# --- registering --------------------------------------------------------------------------------


@pytest.fixture
def focal() -> Iterator[type[SFT]]:
    """The example of the documents: SFT with a loss of its own."""
    from algorithms.base import TrainingBatch

    class FocalSFTConfig(SFTConfig):  # inherits extra="forbid" + all SFT knobs
        gamma: float = 2.0  # focal-loss focusing parameter

    @register_algorithm("focal_sft")
    class FocalSFT(SFT):
        name: ClassVar[str] = "focal_sft"
        Config: ClassVar[type] = FocalSFTConfig

        async def build_batch(self, step_idx: int) -> TrainingBatch:
            batch = await super().build_batch(step_idx)  # reuse SFT's slicing

            def focal_loss(model_output, meta):  # type: ignore[no-untyped-def]
                logp = model_output.logprobs  # per-token target logprob
                p = logp.exp()
                return -((1 - p) ** self.cfg.gamma * logp).mean()

            batch.loss_fn = focal_loss  # client-side custom loss
            return batch

    yield FocalSFT
    ALGORITHMS.forget("focal_sft")


async def test_an_algorithm_of_ones_own_trains(focal: type[SFT]) -> None:
    spec = of_kind("focal_sft", gamma=1.5, learning_rate=0.05, max_steps=20)
    assert spec.algorithm.params.gamma == 1.5  # type: ignore[attr-defined]
    rows = await train(spec, await open_backend(spec))
    assert rows[-1]["train_mean_nll"] < 0.5 * rows[0]["train_mean_nll"]


def test_an_algorithm_of_ones_own_is_checked_like_ours(focal: type[SFT]) -> None:
    assert algorithm_class("focal_sft") is focal
    with pytest.raises(UserError, match=r"algorithm\.params\.gama"):
        of_kind("focal_sft", gama=1)
    assert "focal_sft" in json.dumps(Experiment.model_json_schema())
    (line,) = [line for line in listings() if line.kind == "focal_sft"]
    assert line.origin == "registered by tests.algorithms.test_registry"


def test_a_forgotten_algorithm_is_unknown_again() -> None:
    register_algorithm("passing")(MockSFT)
    ALGORITHMS.forget("passing")
    with pytest.raises(UserError, match="there is no algorithm 'passing'"):
        of_kind("passing")


def test_a_built_in_name_cannot_be_taken() -> None:
    with pytest.raises(ValueError, match="'sft' is built in"):
        register_algorithm("sft")(MockSFT)
    register_algorithm("sft")(SFT)  # the same class is no other
    ALGORITHMS.forget("sft")


def lacking() -> list[tuple[str, type, str]]:
    """Of each list a class that looks like one of its items and lacks a part; what is said."""

    class Unfinished(BaseAlgorithm):
        async def setup(self, ctx: Any, backend: Any) -> None: ...

    class OtherConfig(SFT):
        Config: ClassVar[Any] = BaseModel

    class NoInit:
        Config = VerifierConfig

        def __call__(self, row: Any, completion: str) -> float:
            return 1.0

    class NoOpen:
        Params = MockParams

        @staticmethod
        def check(params: Any, model: Any) -> list[Any]:
            return []

    class Plain:
        Config = TransformConfig

    class NoStep(Environment):
        async def start(self) -> str:
            return ""

    class NoApply(RowTransform):
        pass

    return [
        ("algorithms", Unfinished, "it does not define build_batch"),
        ("algorithms", OtherConfig, "derived from algorithms.base.BaseAlgorithmConfig"),
        ("algorithms", Plain, "it does not derive from algorithms.base.BaseAlgorithm"),
        ("algorithms", MockSFT(BaseAlgorithmConfig()), "it is not a class"),  # type: ignore[list-item]
        ("verifiers", NoInit, "it does not define __init__"),
        ("verifiers", Plain, "it needs a Config class derived from"),
        ("backends", NoOpen, "it does not define open"),
        ("callbacks", Plain, "it does not derive from algorithms.callbacks.Callback"),
        ("environments", NoStep, "it does not define step"),
        ("environments", Plain, "it does not derive from"),
        ("data", Plain, "it does not derive from algorithms.data.dataset.DataSource"),
        ("transforms", NoApply, "it does not define apply"),
        ("transforms", Plain, "algorithms.data.transforms.RowTransform or algorithms.data"),
    ]


@pytest.mark.parametrize(("group", "item", "said"), lacking())
def test_a_class_that_lacks_a_part_is_refused_when_it_is_registered(
    group: str, item: type, said: str
) -> None:
    with pytest.raises(TypeError, match=said):
        REGISTRIES[group].register("lacking", item)
    assert "lacking" not in REGISTRIES[group].rows()


def test_a_decorator_without_its_name_is_told() -> None:
    with pytest.raises(TypeError, match=r'MockSFT lacks its name: write .*"my_algorithm"'):
        register_algorithm(MockSFT)  # type: ignore[arg-type]


# --- plug-ins -----------------------------------------------------------------------------------

PLUGIN = '''
"""A package that brings an algorithm, a verifier and a callback."""
from typing import ClassVar
from algorithms.callbacks import Callback
from algorithms.registry import register_algorithm
from algorithms.rewards.verifiers import ExactMatch
from algorithms.sft import SFT, SFTConfig
from pydantic import BaseModel


class HouseConfig(SFTConfig):
    strength: float

class HouseSFT(SFT):
    """The house's own recipe.

    With more to say about it.
    """
    name: ClassVar[str] = "house"
    Config: ClassVar[type] = HouseConfig

@register_algorithm("self_made")
class SelfMade(SFT):
    """Registers itself and is an entry point too."""

class Bare:
    """Has no parameters."""

class Shout(Callback):
    """Says every step aloud."""
    class Config(BaseModel):
        volume: int = 3
    def __init__(self, cfg):
        self.cfg = cfg
'''

ENTRY_POINTS = """
[flowtune.algorithms]
house = house_plugin:HouseSFT
broken = house_plugin_that_is_gone:Nothing
sft = house_plugin:HouseSFT
self_made = house_plugin:SelfMade
bare = house_plugin:Bare
whole_module = house_plugin
leaves = house_plugin_that_leaves:Nothing

[flowtune.verifiers]
house_match = house_plugin:ExactMatch

[flowtune.callbacks]
shout = house_plugin:Shout
"""

OTHER_ENTRY_POINTS = """
[flowtune.algorithms]
house = house_plugin:SelfMade

[flowtune.recipes]
hut = house_plugin:HouseSFT
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "house_plugin.py").write_text(PLUGIN)
    (tmp_path / "house_plugin_that_leaves.py").write_text("import sys\n\nsys.exit('I leave')\n")
    info = tmp_path / "house-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: house\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    other = tmp_path / "hut-0.1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: hut\nVersion: 0.1\n")
    (other / "entry_points.txt").write_text(OTHER_ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    for registry in REGISTRIES.values():
        registry.reload()
    yield
    monkeypatch.undo()
    ALGORITHMS.forget("self_made")
    sys.modules.pop("house_plugin", None)
    importlib.invalidate_caches()
    for registry in REGISTRIES.values():
        registry.reload()


@pytest.mark.usefixtures("plugin")
def test_a_plug_in_is_chosen_from_the_document() -> None:
    spec = experiment(
        algorithm={"kind": "house", "params": {"strength": 2}},
        backend={"kind": "mock"},
        callbacks=[{"kind": "shout", "params": {"volume": 11}}],
    )
    assert spec.algorithm.params.strength == 2.0  # type: ignore[attr-defined]
    assert type(spec.algorithm.build()).__name__ == "HouseSFT"
    callback: Any = spec.callbacks[0].build()
    assert callback.cfg.volume == 11
    assert parse_experiment(spec.model_dump(mode="json")) == spec
    with pytest.raises(UserError, match=r"algorithm\.params\.strength: is missing"):
        experiment(algorithm={"kind": "house", "params": {}})
    with pytest.raises(UserError, match=r"algorithm\.params: is missing"):
        experiment(algorithm={"kind": "house"})


@pytest.mark.usefixtures("plugin")
def test_a_plug_in_is_listed_with_where_it_comes_from() -> None:
    lines = {(line.group, line.kind): line for line in listings()}
    house = lines["algorithms", "house"]
    assert (house.summary, house.origin) == ("The house's own recipe.", "plug-in house 1.2")
    assert lines["algorithms", "sft"].origin == "built in"
    assert lines["verifiers", "house_match"].origin == "plug-in house 1.2"
    assert lines["callbacks", "shout"].summary == "Says every step aloud."
    assert lines["algorithms", "self_made"].origin == "plug-in house 1.2"
    assert experiment(algorithm={"kind": "self_made"}, backend={"kind": "mock"})


@pytest.mark.usefixtures("plugin")
def test_a_broken_plug_in_is_named_and_the_rest_works() -> None:
    broken = {line.kind: line.error for line in listings() if line.error and "house" in line.error}
    assert "No module named 'house_plugin_that_is_gone'" in broken["broken"]
    assert "plug-in house 1.2" in broken["broken"]
    bare = next(line.error for line in listings() if line.kind == "bare")
    assert "is no algorithm: it does not derive from algorithms.base.BaseAlgorithm" in str(bare)
    assert (
        "an entry point names a class, as in my_package.losses:FocalLoss" in broken["whole_module"]
    )
    assert "does not import: SystemExit: I leave" in broken["leaves"]
    assert "house_plugin_that_leaves.py, line 3)" in broken["leaves"]
    taken = {line.kind: line.error for line in listings() if line.group == "algorithms"}
    assert taken["sft (plug-in house 1.2)"] == "the name 'sft' is built in"
    assert algorithm_class("sft") is SFT
    twice = {
        kind: why for kind, why in taken.items() if str(why).endswith("brings 'house' already")
    }
    assert len(twice) == 1
    (misplaced,) = [line for line in listings() if line.group == "plug-ins"]
    assert misplaced.kind == "hut"
    assert str(misplaced.error).startswith("plug-in hut 0.1 names it in flowtune.recipes, and")
    with pytest.raises(UserError) as caught:
        experiment(algorithm={"kind": "broken"})
    (problem,) = caught.value.problems
    assert problem.where == "algorithm.kind"
    assert "cannot be used" in problem.what
    assert "house_plugin_that_is_gone" in problem.remedy


def test_without_plug_ins_only_ours_are_left() -> None:
    assert set(KINDS) == set(ALGORITHMS.rows())
    assert algorithm_class("sampling") is Sampling
    _, problems = check_experiment(document(algorithm={"kind": "house"}))
    assert any("there is no algorithm 'house'" in problem.what for problem in problems)
