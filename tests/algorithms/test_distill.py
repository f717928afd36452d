"""Distillation without a model: who cannot teach, and what the student is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from algorithms.distilling import Distilling
from algorithms.teachers import TeacherSection, check_teacher
from backends.errors import Problem, UserError
from tests.algorithms.samples import MODEL, byte_tokenizer, chat, experiment, open_backend, set_up

ROWS = [chat(f"say {word}", word) for word in ("alpha", "bravo", "charlie", "delta")]


def distill(rows: list[dict[str, Any]] = ROWS, **params: Any) -> Any:
    """A mock experiment."""
    shared = {"batch_size": 2, "teacher": {"model": "a larger one"}}
    return experiment(
        data={"kind": "rows", "rows": rows},
        algorithm={"kind": "distill", "params": {**shared, **params}},
        backend={"kind": "mock"},
    )


@pytest.mark.parametrize(
    ("params", "field", "says"),
    [
        ({"teacher": None}, "teacher", None),
        ({"teacher": {}}, "teacher", "names nobody: give a model, weights, or both"),
        ({"teacher": {"model": ""}}, "teacher.model", "at least 1 character"),
        ({"teacher": {"name": "x"}}, "teacher.name", None),
        ({"kl_discount_factor": 1.5}, "kl_discount_factor", "less than or equal to 1"),
    ],
)
def test_what_cannot_train_is_refused_with_its_field(
    params: dict[str, Any], field: str, says: str | None
) -> None:
    with pytest.raises(UserError, match=says) as refused:
        distill(**params)
    assert [p.where for p in refused.value.problems] == [f"algorithm.params.{field}"]


async def test_a_teacher_that_is_not_there_is_told_with_its_field(tmp_path: Path) -> None:
    spec = distill(teacher={"weights": str(tmp_path)})
    with pytest.raises(UserError, match="not a checkpoint of the mock") as refused:
        await set_up(spec, await open_backend(spec))
    assert [p.where for p in refused.value.problems] == ["algorithm.params.teacher.weights"]


def test_a_teacher_has_to_share_the_vocabulary(tmp_path: Path) -> None:
    def problem_of(name: str) -> Problem | None:
        try:
            check_teacher(TeacherSection(model=name), "student", student, "teacher")
        except UserError as error:
            (problem,) = error.problems
            assert problem.where == "teacher.model"
            return problem
        return None

    student = byte_tokenizer()
    student.save_pretrained(tmp_path / "same")
    byte_tokenizer(merges=(("a", "b"),)).save_pretrained(tmp_path / "other")
    for folder in (tmp_path / "same", tmp_path / "other"):
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_text("")
    assert problem_of(str(tmp_path / "same")) is None
    other = problem_of(str(tmp_path / "other"))
    assert other is not None
    assert "has another vocabulary: 256 of the 258 tokens of the trained model" in other.what
    missing = problem_of(str(tmp_path / "none"))
    assert missing is not None
    assert "there is no folder" in missing.what
    assert problem_of(str(MODEL)) is not None


async def test_the_advantage_of_a_token_is_how_much_likelier_the_teacher_finds_it() -> None:
    spec = distill(num_samples=3)
    backend = await open_backend(spec)
    algorithm = await set_up(spec, backend)
    batch = await algorithm.build_batch(0)
    assert batch.loss_fn == "importance_sampling"
    assert len(batch.data) == 2 * 3
    student = await backend.snapshot_sampling_client()
    teacher = await backend.open_sampling_client("a larger one")
    for datum in batch.data:
        inputs = {name: tensor.to_numpy() for name, tensor in datum.loss_fn_inputs.items()}
        targets = inputs["target_tokens"]
        own, theirs = (client._state.logprobs(targets) for client in (student, teacher))  # type: ignore[attr-defined]
        sampled = inputs["logprobs"] != 0
        assert 9 < sampled.sum() < 13  # "say alpha" to "say charlie", and the end
        assert not sampled[: -int(sampled.sum())].any()
        np.testing.assert_allclose(inputs["logprobs"][sampled], own[sampled], rtol=1e-6)
        expected = np.where(sampled, theirs - own, 0)
        np.testing.assert_allclose(inputs["advantages"], expected, atol=1e-6)
    rewards = [transcript.reward for transcript in batch.transcripts]
    assert batch.metrics["reward/mean"] == pytest.approx(np.mean(rewards))
    first = batch.data[0].loss_fn_inputs["advantages"].to_numpy()
    assert rewards[0] == pytest.approx(first[first != 0].mean(), rel=1e-5)
    assert batch.transcripts[0].messages[0]["role"] == "user"
    assert batch.transcripts[0].messages[-1]["role"] == "assistant"


async def test_rows_may_leave_out_the_answer_and_be_plain_text() -> None:
    rows = [{"messages": [{"role": "user", "content": "one"}]}, {"prompt": "two"}]
    algorithm = await set_up(spec := distill(rows), await open_backend(spec))
    assert isinstance(algorithm, Distilling)
    prompts = [bytes(token for token in q.prompt if token < 256) for q in algorithm._questions]
    assert prompts == [b"user\none\nassistant\n", b"two"]
    assert all(question.prompt == question.teacher_prompt for question in algorithm._questions)
    spec = distill(rows, system_prompt="be brief")
    with pytest.raises(UserError, match="a plain prompt, which takes no system_prompt"):
        await set_up(spec, await open_backend(spec))
