"""TRL runs that several processes share: the same curve, exact resume, a process that is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from algorithms.callbacks import Callback
from algorithms.experiment import Experiment, parse_experiment
from algorithms.local import processes
from algorithms.local.processes import announced
from algorithms.local_rl import LocalRL, LocalRLConfig
from algorithms.local_sft import LocalSFT, LocalSFTConfig
from backends.base import ModelSpec
from backends.errors import StateLostError, UserError
from backends.local import LocalBackend, LocalKind, LocalParams, open_local
from tests.algorithms.test_local import cut_off_after, document, files_of, opened, rows_of, trained

MODEL = "examples/models/tiny-qwen3"
NEAR = 1e-6
"""How far losses may be apart, in nats: float32 sums in another order."""


def shared(kind: str, store: Path, num_processes: int, **params: Any) -> Experiment:
    several = document(kind, store, **{"batch_size": 2 * num_processes, **params})
    several["backend"]["params"]["num_processes"] = num_processes
    return parse_experiment(several)


# --- what is refused, and how rows are dealt out ------------------------------------------------


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"batch_size": 4}, "batch_size 4 is no multiple of num_processes 3"),
        (
            {"micro_batch_size": 6, "batch_size": 12},
            "batch_size 12 gives each of 3 processes 4 rows, which are no multiple",
        ),
    ],
)
def test_a_batch_that_cannot_be_dealt_out_is_refused(
    params: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        shared("local_sft", tmp_path, 3, **params)


def test_a_launcher_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    problems = LocalKind.check(LocalParams(), ModelSpec(name=MODEL))
    assert [problem.where for problem in problems] == ["backend.params.num_processes"]


def test_every_process_needs_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    params = LocalParams(device="cuda", num_processes=3)
    with pytest.raises(UserError, match="3 processes, and 2 cuda device"):
        open_local(params, ModelSpec(name=MODEL), None)


@pytest.mark.parametrize("micro_batch_size", [None, 1, 2])
def test_each_process_has_its_part_of_every_step(micro_batch_size: int | None) -> None:
    def parts(rank: int) -> list[list[int]]:
        algorithm = LocalSFT(LocalSFTConfig(batch_size=8, micro_batch_size=micro_batch_size))
        algorithm.rows = 24
        algorithm.context = SimpleNamespace(config=SimpleNamespace(seed=5))  # type: ignore[assignment]
        algorithm.backend = SimpleNamespace(rank=rank, num_processes=2)  # type: ignore[assignment]
        algorithm._passes = algorithm.cfg.passes(2)
        algorithm._steps_per_epoch = 3
        whole.append(algorithm.step_rows(1))
        return algorithm.micro_batches(1)

    whole: list[list[int]] = []
    first, second = parts(0), parts(1)
    size = micro_batch_size or 4
    assert [len(part) for part in first + second] == [size] * (8 // size)
    assert whole[0] == [row for pair in zip(first, second, strict=True) for p in pair for row in p]


def test_each_process_has_its_share_of_the_groups_in_order() -> None:
    algorithm = LocalRL(LocalRLConfig(batch_size=2, num_samples=2, micro_batch_size=1))
    algorithm.step_rows = lambda step_idx: [7, 3]  # type: ignore[method-assign]
    algorithm._passes = 1
    for rank, own in ((0, [7, 7]), (1, [3, 3])):
        algorithm.backend = SimpleNamespace(rank=rank, num_processes=2)  # type: ignore[assignment]
        assert algorithm.micro_batches(0) == [own]


def test_the_environment_is_as_it_was_after_a_trainer_is_made() -> None:
    before = dict(os.environ)
    with announced(SimpleNamespace(rank=1, num_processes=3)):  # type: ignore[arg-type]
        assert {name: os.environ[name] for name in ("RANK", "WORLD_SIZE")} == {
            "RANK": "1",
            "WORLD_SIZE": "3",
        }
    assert dict(os.environ) == before


# --- runs ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "column"), [("local_sft", "train_mean_nll"), ("local_dpo", "loss")]
)
async def test_two_processes_train_what_one_trains(kind: str, column: str, tmp_path: Path) -> None:
    params = {"grad_clip_norm": 0.2, "weight_decay": 0.1, "micro_batch_size": 1}
    one = await trained(await opened(shared(kind, tmp_path / "one", 1, batch_size=4, **params)))
    two = await trained(await opened(shared(kind, tmp_path / "two", 2, batch_size=4, **params)))
    for alone, together in zip(rows_of(one), rows_of(two), strict=True):
        assert alone.keys() == together.keys()
        assert together[column] == pytest.approx(alone[column], abs=NEAR)
        assert together["tokens/total"] == alone["tokens/total"]
        assert together["optim/grad_norm"] == pytest.approx(alone["optim/grad_norm"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_processes", "trainer"),
    [("local_sft", 3, {"neftune_noise_alpha": 5}), ("local_rl", 2, {})],
)
async def test_a_shared_run_goes_on_exactly(
    kind: str, num_processes: int, trainer: dict[str, Any], tmp_path: Path
) -> None:
    """With random numbers of its own in each process: NEFTune's noise, and what is sampled."""

    def spec(store: str) -> Experiment:
        return shared(kind, tmp_path / store, num_processes, trainer=trainer)

    whole = await trained(await opened(spec("whole")))
    await cut_off_after(2, await opened(spec("cut")))
    again = await trained(await opened(spec("cut")))
    assert again.plan.first_step == 2
    assert rows_of(again) == rows_of(whole)
    assert files_of(again) == files_of(whole)


class KillsOther(Callback):
    """Kills one of the other processes after the first step."""

    def __init__(self) -> None:
        self.others: list[processes.Process] = []

    def on_step(self, row: dict[str, float]) -> None:
        os.kill(self.others[0].pid, signal.SIGKILL)


@pytest.mark.slow
async def test_a_lost_process_is_a_lost_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killer = KillsOther()

    class Noted(processes.Process):
        def __init__(self, folder: Path, rank: int) -> None:
            super().__init__(folder, rank)
            killer.others.append(self)

    monkeypatch.setattr(processes, "Process", Noted)
    run = await opened(shared("local_sft", tmp_path, 2))
    run.callbacks.append(killer)
    with pytest.raises(StateLostError, match="process 1 of the run was killed by signal 9"):
        await trained(run)
    again = await trained(await opened(shared("local_sft", tmp_path, 2)))
    assert [row["step"] for row in rows_of(again)] == [1, 2, 3, 4]


@pytest.mark.slow
async def test_one_that_is_lost_while_the_others_get_ready_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is ready and waits for the others; nothing but the leader could miss it."""

    class Killed(processes.Process):
        def wait_until_ready(self) -> None:
            super().wait_until_ready()
            if self.rank == 1:
                os.kill(self.pid, signal.SIGKILL)

    monkeypatch.setattr(processes, "Process", Killed)
    run = await opened(shared("local_sft", tmp_path, 3))
    with pytest.raises(StateLostError, match="process 1 of the run was killed by signal 9"):
        await trained(run)


@pytest.mark.slow
async def test_an_error_of_the_leaders_own_is_told_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> dict[str, float]:
        raise RuntimeError("no metrics today")

    monkeypatch.setattr(LocalSFT, "metrics", broken)
    run = await opened(shared("local_sft", tmp_path, 2))
    with pytest.raises(RuntimeError, match="no metrics today"):
        await trained(run)


@pytest.mark.slow
async def test_the_others_end_with_the_leader_and_clean_up(tmp_path: Path) -> None:
    run = await opened(shared("local_sft", tmp_path, 2))
    backend = run.backend
    assert isinstance(backend, LocalBackend)
    folder = tmp_path / "shared"
    folder.mkdir()
    processes.Told.by(run.context, SimpleNamespace(first_step=0)).write(folder)  # type: ignore[arg-type]
    backend.write_start(folder)
    other = processes.Process(folder, 1)
    await asyncio.to_thread(other.wait_until_ready)
    other._process.stdin.close()  # type: ignore[union-attr]  # as the system does for the dead
    await asyncio.to_thread(other.wait_until_over)
    assert not folder.exists()
    await run.backend.aclose()


@pytest.mark.slow
async def test_a_mistake_that_another_process_finds_is_told(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    row = '{"prompt": "1+1=", "completion": "2"}\n'
    rows.write_text(row * 8)
    changed = document("local_sft", tmp_path, batch_size=4)
    changed["data"]["path"] = str(rows)
    changed["backend"]["params"]["num_processes"] = 2
    run = await opened(parse_experiment(changed))
    rows.write_text(row * 9)
    with pytest.raises(UserError, match="the rows are not those that the run's own process"):
        await trained(run)
