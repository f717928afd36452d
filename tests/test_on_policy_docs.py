"""docs/on-policy.md holds what it promises: its own environment and verifier train a run."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from algorithms.base import RunContext
from algorithms.check import check_experiment
from algorithms.experiment import load_experiment
from algorithms.registry import ALGORITHMS
from algorithms.rewards.verifiers import VERIFIERS
from algorithms.rollouts.environment import ENVIRONMENTS
from backends.storage.run_store import RunStore

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/on-policy.md").read_text()
FILES = dict(re.findall(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with the files of the page."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("my_twice", None)
    ENVIRONMENTS.forget("twice")
    VERIFIERS.forget("short")


async def test_the_environment_and_the_verifier_of_the_page_train_a_run(folder: Path) -> None:
    experiment, problems = check_experiment("my_twice.yaml")
    assert experiment is not None
    assert problems == []
    # The mock's answers are all of one length, so groups whose rewards are alike have to count.
    params = {"max_steps": 3, "max_tokens": 64, "drop_constant_reward": "false"}
    overrides = [f"algorithm.params.{name}={value}" for name, value in params.items()]
    spec = load_experiment("my_twice.yaml", ["backend.kind=mock", *overrides])
    backend = await spec.backend.row().open(spec.backend.params, spec.model_spec(), None)
    dataset, tokenizer = spec.data.load(), backend.get_tokenizer()
    context = RunContext("a", str(folder), spec, dataset, backend, tokenizer)
    result = await spec.algorithm.build().train(context)
    await backend.aclose()
    assert (result.status, result.error) == ("completed", None)
    row = RunStore(spec.store, "a").metrics()[-1]
    assert row["rollout/turns"] == 2
    assert row["reward/mean"] > 0
    assert 0 <= row["env/same"] <= 1


def test_every_parameter_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`([a-z_]+)(?:: [^`]*)?`", PAGE))
    fields = set(ALGORITHMS["rl"].Config.model_fields) | set(ALGORITHMS["sdft"].Config.model_fields)
    for word in ("num_samples", "max_staleness", "kl_penalty_coef", "teacher_sync_every"):
        assert word in PAGE
        assert word in fields
    assert {"drop_constant_reward", "agent_import_path", "demo_template"} <= named & fields
