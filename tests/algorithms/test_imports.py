"""An experiment names modules of its own, and their kinds are known when it is read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from algorithms.check import check_experiment
from algorithms.experiment import parse_experiment
from algorithms.rewards.verifiers import VERIFIERS
from algorithms.rollouts.environment import ENVIRONMENTS
from backends.errors import UserError

MODULE = '''
from pydantic import Field

from algorithms.registry import register_environment, register_verifier
from algorithms.rewards.verifiers import VerifierConfig
from algorithms.rollouts.environment import Environment, Step


class HasWordConfig(VerifierConfig):
    word: str = Field(description="What has to be there.")


@register_verifier("has_word")
class HasWord:
    """1 if a word is there."""

    Config = HasWordConfig

    def __init__(self, cfg):
        self.cfg = cfg

    def __call__(self, row, completion):
        return float(self.cfg.word in completion)


@register_environment("say_it")
class SayIt(Environment):
    """The model is to say the row's word."""

    async def start(self):
        return [{"role": "user", "content": self.row["word"]}]

    async def step(self, message):
        return Step(reward=await self.score(message["content"]), done=True)
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module in the working directory that nobody has imported yet."""
    (tmp_path / "my_own_kinds.py").write_text(MODULE)
    (tmp_path / "my_broken_kinds.py").write_text("\n1 / 0")
    (tmp_path / "my_unread_kinds.py").write_text("x = 1\ny = (")
    (tmp_path / "my_script.py").write_text("raise SystemExit('bye')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield "my_own_kinds"
    sys.modules.pop("my_own_kinds", None)
    for registry, kind in ((VERIFIERS, "has_word"), (ENVIRONMENTS, "say_it")):
        if kind in registry.rows():
            registry.forget(kind)


def document(**changes: Any) -> dict[str, Any]:
    """An experiment that uses both kinds."""
    verifier = {"kind": "has_word", "params": {"word": "yes"}}
    base: dict[str, Any] = {
        "name": "own",
        "imports": ["my_own_kinds"],
        "model": {"name": "mock"},
        "data": {"kind": "rows", "rows": [{"word": "yes"}]},
        "algorithm": {
            "kind": "rl",
            "params": {"verifier": verifier, "environment": {"kind": "say_it"}},
        },
        "backend": {"kind": "mock"},
    }
    return base | changes


def test_its_kinds_are_known_wherever_one_may_stand(module: str) -> None:
    rows = {"kind": "rows", "rows": [{"prompt": "a", "completion": "b"}]}
    evaluation = {
        "name": "e",
        "data": rows,
        "verifier": {"kind": "has_word", "params": {"word": "b"}},
    }
    experiment = parse_experiment(document(evaluations=[evaluation]))
    params: Any = experiment.algorithm.params
    assert (params.verifier.kind, params.environment.kind) == ("has_word", "say_it")
    assert params.verifier.params.word == "yes"
    assert parse_experiment(experiment.model_dump(mode="json")) == experiment
    assert check_experiment(document(evaluations=[evaluation]))[1] == []


def test_their_parameters_are_checked_like_any(module: str) -> None:
    wrong = document()
    wrong["algorithm"]["params"]["verifier"] = {"kind": "has_word", "params": {"words": "yes"}}
    with pytest.raises(UserError) as refused:
        parse_experiment(wrong)
    assert "algorithm.params.verifier.params.words" in str(refused.value)


@pytest.mark.parametrize(
    ("imports", "said"),
    [
        (["my_missing_kinds"], r"does not import: ModuleNotFoundError: .* \(looked in .* too\)"),
        (
            ["my_broken_kinds"],
            r"does not import: ZeroDivisionError: .*my_broken_kinds.py, line 2\)$",
        ),
        (["my_unread_kinds"], r"does not import: SyntaxError: .*my_unread_kinds.py, line 2\)$"),
        (["my_script"], "my_script does not import: SystemExit: bye"),
        (["my_own_kinds.py"], "is a file, and a module is wanted: write my_own_kinds$"),
        (["./parts/my_own_kinds.py"], "write parts.my_own_kinds$"),
        ("my_own_kinds", "should be a valid list"),
    ],
)
def test_a_module_that_does_not_import_is_named(module: str, imports: Any, said: str) -> None:
    with pytest.raises(UserError, match=said) as refused:
        parse_experiment(document(imports=imports))
    assert "imports" in {problem.where for problem in refused.value.problems}
