"""SDFT without a model: what is refused, what the teacher reads, and who it is after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from algorithms.opening import open_live_run
from algorithms.run import LiveRun
from algorithms.sdft import SDFT, demonstrated, demonstration
from algorithms.soft_targets import reverse_kl
from algorithms.teachers import SyncedTeacher
from backends.base import ModelSpec, SamplingClient
from backends.errors import UserError
from backends.mock import MockBackend, MockParams, MockSamplingClient, MockState
from backends.storage.objects import open_store
from backends.storage.run_store import RunStore
from tests.algorithms.samples import chat, experiment, open_backend, set_up

ROWS = [chat(f"say {word}", word) for word in ("alpha", "bravo", "charlie", "delta")]
STEPS = 7


def sdft(rows: list[dict[str, Any]] = ROWS, **params: Any) -> Any:
    """A mock experiment."""
    return experiment(
        data={"kind": "rows", "rows": rows},
        algorithm={"kind": "sdft", "params": {"batch_size": 2, **params}},
        backend={"kind": "mock"},
    )


@pytest.mark.parametrize(
    ("params", "field", "says"),
    [
        ({"topk": 0}, "topk", "greater than or equal to 1"),
        ({"mode": "both"}, "mode", "forward_kl"),
        ({"teacher_sync_every": 0}, "teacher_sync_every", "greater than or equal to 1"),
        ({"demo_template": "{prompt}"}, "demo_template", r"put \{answer\} into it"),
        ({"demo_template": "{answer}"}, "demo_template", r"put \{prompt\} into it"),
        ({"user_template": "Well?"}, "user_template", r"put \{prompt\} into it"),
        ({"max_tokens": 3}, "skip_first_n_tokens", "is 3, and max_tokens is 3"),
        ({"skip_first_n_tokens": 256}, "skip_first_n_tokens", "max_tokens is 256"),
        ({"max_context_length": 9, "skip_first_n_tokens": 9}, "skip_first_n_tokens", "no token"),
        ({"temperature": 0, "num_samples": 2}, "num_samples", "at temperature 0 all answers"),
    ],
)
def test_what_cannot_train_is_refused_with_its_field(
    params: dict[str, Any], field: str, says: str
) -> None:
    with pytest.raises(UserError, match=says) as refused:
        sdft(**params)
    assert [p.where for p in refused.value.problems] == [f"algorithm.params.{field}"]


async def test_rows_that_cannot_be_demonstrated_are_named() -> None:
    rows = [
        {"messages": [{"role": "user", "content": "a"}]},
        {"messages": [{"role": "tool", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"prompt": "a", "completion": "b"},
    ]
    spec = sdft(rows, system_prompt="be brief")
    with pytest.raises(UserError) as refused:
        await set_up(spec, await open_backend(spec))
    assert [p.what.partition(",")[0] for p in refused.value.problems] == [
        "messages has no assistant turn",
        "has no user turn before its answer",
        "a plain prompt",
    ]


async def test_a_context_that_no_demonstration_fits_is_refused_and_long_rows_are_left_out() -> None:
    spec = sdft(max_context_length=20)
    with pytest.raises(UserError, match="the teacher reads 20 tokens, and no row's prompt"):
        await set_up(spec, await open_backend(spec))
    spec = sdft([*ROWS, chat("say it", "x" * 400)], max_context_length=300)
    algorithm = await set_up(spec, await open_backend(spec))
    assert algorithm.setup_metrics() == {
        "data/rows": 4.0,
        "data/rows_dropped": 1.0,
        "data/rows_skipped": 0.0,
    }


def test_braces_in_prompt_and_answer_stay() -> None:
    assert demonstration("{prompt}|{answer}|{other}", "{answer}", "{prompt}") == (
        "{answer}|{prompt}|{other}"
    )
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    shown = demonstrated([*turns, {"role": "user", "content": "c"}], "{prompt}: {answer}", "d")
    assert [turn["content"] for turn in shown] == ["a", "b", "c: d"]


async def test_the_student_reads_the_template_and_the_teacher_the_demonstration() -> None:
    templates = {"user_template": "Q: {prompt}", "demo_template": "{prompt} = {answer}"}
    spec = sdft(ROWS[:1], system_prompt="be brief", **templates)
    backend = await open_backend(spec)
    algorithm = await set_up(spec, backend)
    assert isinstance(algorithm, SDFT)
    (question,) = algorithm._questions
    tokenizer = backend.get_tokenizer()
    opening, end = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n"
    assert tokenizer.decode(question.prompt) == (
        f"{opening}Q: say alpha{end}<|im_start|>assistant\n"
    )
    assert tokenizer.decode(question.teacher_prompt) == (
        f"{opening}say alpha = alpha{end}<|im_start|>assistant\n"
    )


async def test_plain_prompts_take_a_plain_demonstration() -> None:
    spec = sdft([{"prompt": "one two", "completion": " three"}], demo_template="{prompt}{answer}.")
    algorithm = await set_up(spec, await open_backend(spec))
    (question,) = algorithm._questions  # type: ignore[attr-defined]
    assert bytes(question.prompt) == b"one two"
    assert bytes(question.teacher_prompt) == b"one two three."


async def test_an_answer_is_scored_as_far_as_the_teacher_reads() -> None:
    # The teacher's prompt has 31 bytes (and 4 special tokens); "say alpha" and its end are 10.
    spec = sdft(ROWS[:1], demo_template="{prompt}{answer}", num_samples=2, batch_size=1)
    backend = await open_backend(spec)
    length = len((await set_up(spec, backend))._questions[0].teacher_prompt)  # type: ignore[attr-defined]
    spec = sdft(
        ROWS[:1],
        demo_template="{prompt}{answer}",
        num_samples=2,
        batch_size=1,
        max_context_length=length + 7,
    )
    batch = await (await set_up(spec, backend)).build_batch(0)
    assert batch.metrics["sdft/teacher_truncated_count"] == 2
    assert batch.metrics["sdft/total_completion_tokens"] == 2 * (7 - 3)
    assert batch.metrics["sdft/num_datums"] == 2
    for datum in batch.data:
        counted = np.flatnonzero(datum.loss_fn_inputs["weights"].to_numpy().any(axis=1))
        end = datum.model_input.length + 1 - 10  # of the student's prompt
        assert counted.tolist() == [end - 1 + t for t in range(3, 7)]


async def test_answers_too_short_to_count_leave_an_empty_batch() -> None:
    spec = sdft([chat("ab", "ab")] * 4)  # "ab" and its end: three tokens, all skipped
    algorithm = await set_up(spec, await open_backend(spec))
    batch = await algorithm.build_batch(0)
    assert batch.data == []
    assert [transcript.advantage for transcript in batch.transcripts] == [None, None]


# --- the teacher that follows the student --------------------------------------------------------


async def opened(folder: Path, **params: Any) -> LiveRun:
    # Of the mock's 258 tokens the likeliest 20 are equally likely under any weights; all are not.
    shared = {"max_steps": STEPS, "learning_rate": 0.05, "topk": 258}
    spec = sdft(**{**shared, **params})
    return await open_live_run(spec, RunStore(str(folder), "run"))


async def finish(run: LiveRun, stop: int = STEPS) -> list[dict[str, float]]:
    """Train to a step, through the saves that lie before it; the rows without their times."""
    marks = [mark for mark in run.plan.save_steps if run.plan.first_step < mark <= stop]
    for start, end in zip([run.plan.first_step, *marks], marks, strict=False):
        await run.run_segment(run, start, end)
    await run.settle()
    await run.cancel()
    await run.backend.aclose()
    return [
        {name: value for name, value in row.items() if not name.startswith("time/")}
        for row in run.store.metrics()
    ]


def end_of(run: LiveRun) -> bytes:
    manifest = run.store.latest_checkpoint()
    assert manifest is not None
    folder = run.store.checkpoint_folder(manifest)
    assert folder is not None
    return (folder / "adapter_model.safetensors").read_bytes()


async def test_a_teacher_that_follows_is_another_than_a_frozen_one(tmp_path: Path) -> None:
    ends = []
    for every in (None, 1, 3):
        run = await opened(tmp_path / str(every), teacher_sync_every=every)
        await finish(run)
        ends.append(end_of(run))
    assert len(set(ends)) == 3


@pytest.mark.parametrize(
    ("mode", "every", "save_every", "cut"),
    [
        ("forward_kl", 3, 2, 4),  # the teacher after 3 steps is the one that was made before
        ("importance_sampling", 2, 5, 5),  # made again, from the weights of the checkpoint
        ("reverse_kl", 3, 4, 7),  # batches that are not kept, but sampled again
    ],
)
async def test_a_resumed_run_has_the_same_teacher(
    tmp_path: Path, mode: str, every: int, save_every: int, cut: int
) -> None:
    params = {"teacher_sync_every": every, "save_every": save_every, "mode": mode}
    whole = await opened(tmp_path / "whole", **params)
    rows = await finish(whole)
    first = await opened(tmp_path / "cut", **params)
    await first.run_segment(first, 0, save_every)
    await first.settle()
    await first.run_segment(first, save_every, min(cut, 2 * save_every, STEPS))
    await first.cancel()  # whatever is on its way at this moment is lost
    await first.backend.aclose()
    again = await opened(tmp_path / "cut", **params)
    assert again.plan.first_step >= save_every
    assert await finish(again) == rows
    assert end_of(again) == end_of(whole)


async def test_teachers_that_no_checkpoint_needs_are_removed(tmp_path: Path) -> None:
    run = await opened(tmp_path, teacher_sync_every=1, save_every=1)
    await finish(run)
    left = sorted(path.name[:11] for path in (tmp_path / "run" / "teachers").iterdir())
    assert left == ["step-000003", "step-000004", "step-000005", "step-000006"]


class KeepsItsFiles(MockBackend):
    """As the hosted service: weights are named by their address, and never given out."""

    async def export_state(self, uri: str, folder: Path) -> bool:
        return False

    async def open_sampling_client(
        self, model: str | None = None, weights: str | None = None
    ) -> SamplingClient:
        if weights is None:
            return await super().open_sampling_client(model)
        return MockSamplingClient(self._saved[weights])


async def test_a_server_that_keeps_its_files_keeps_the_teachers_it_needs(tmp_path: Path) -> None:
    backend = KeepsItsFiles(MockParams(), ModelSpec(name="mock"), MockState.fresh(0))
    start, run = await backend.open_sampling_client(), open_store(tmp_path)
    teacher = SyncedTeacher(backend, run, start, 2, save_steps=[3, 4, 5, 6, 7, 8], code="x")
    assert await teacher.at(1) is start
    second = await teacher.at(2)
    assert second is not start
    assert await teacher.at(3) is second
    for step in (4, 6, 8):
        await teacher.at(step)
    # Of the checkpoints up to 8 that after 5 is surely there, and it needs the teacher after 4.
    assert sorted(backend._saved) == [f"mock://sampler_weights/teacher-00000{n}" for n in (4, 6, 8)]
    again = SyncedTeacher(backend, run, start, 2, save_steps=[3, 4, 5, 6, 7, 8], code="x")
    assert await again.at(5) is not start


async def test_a_teacher_that_is_gone_is_told(tmp_path: Path) -> None:
    params = {"teacher_sync_every": 3, "save_every": 4}
    run = await opened(tmp_path, **params)
    await finish(run, stop=4)
    for path in (tmp_path / "run" / "teachers").glob("*/teacher.json"):
        path.unlink()
    again = await opened(tmp_path, **params)
    assert again.plan.first_step == 4
    with pytest.raises(UserError, match="the teacher after 3 steps is not in"):
        await finish(again)
    await again.backend.aclose()


async def test_the_modes_train_under_their_losses() -> None:
    losses = []
    for mode in ("forward_kl", "reverse_kl", "importance_sampling"):
        spec = sdft(mode=mode)
        batch = await (await set_up(spec, await open_backend(spec))).build_batch(0)
        losses.append(batch.loss_fn)
    assert losses == ["cross_entropy", reverse_kl, "importance_sampling"]
