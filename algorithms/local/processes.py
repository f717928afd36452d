"""Several processes of this machine that share each step, through accelerate.

The run's own process leads: it has the store, the evaluations and the checkpoints. The others
(`algorithms.local.follow`) start from the same weights and take the same steps, each with its part
of every batch; after each step they wait for the leader's word. torch.distributed carries the
gradients, and the words.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from algorithms.base import RunContext, StepLoop, Transcript
from algorithms.local.randomness import random_state
from backends.errors import FlowtuneError, Problem, StateLostError, UserError
from backends.local import LocalBackend

T = TypeVar("T")

STOP_SECONDS = 5.0
"""How long a process may take to end, or to be seen to have ended."""

LOG_LINES_SHOWN = 15

NO_LIMIT = timedelta(days=30)
"""The others wait inside torch.distributed while the leader evaluates, however long that takes."""


class Word(IntEnum):
    """What the leader says after a step."""

    STOP = 0
    GO_ON = 1
    GIVE_RANDOM_STATE = 2


# --- the run's loop, as each process sees it ----------------------------------------------------


class Leader:
    """The loop of the process that has the run: what is decided here, all processes do."""

    def __init__(self, loop: StepLoop, num_processes: int) -> None:
        self.first_step = loop.first_step
        self.total_steps = loop.total_steps
        self._loop = loop
        self._num_processes = num_processes

    def begins(self) -> None:
        """See `StepLoop`."""
        self._loop.begins()

    def step_done(self, row: Mapping[str, float], transcripts: Sequence[Transcript] = ()) -> bool:
        """See `StepLoop`."""
        goes_on = self._loop.step_done(row, transcripts)
        self._say(Word.GO_ON if goes_on else Word.STOP)
        return goes_on

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """See `StepLoop`."""
        return self._loop.wait(work)

    def random_states(self) -> list[dict[str, Any]]:
        """Where the random generators of every process stand; to be asked between two steps."""
        if self._num_processes == 1:
            return [random_state()]
        from torch.distributed import gather_object

        self._say(Word.GIVE_RANDOM_STATE)
        states: list[Any] = [None] * self._num_processes
        gather_object(random_state(), states)
        return states

    def _say(self, word: Word) -> None:
        if self._num_processes > 1:
            import torch
            from torch.distributed import broadcast

            broadcast(torch.tensor([word]), src=0)


class Follower:
    """The loop of every other process: it has the same rows, and waits for the leader's word."""

    def __init__(
        self, first_step: int, total_steps: int, events: asyncio.AbstractEventLoop
    ) -> None:
        self.first_step = first_step
        self.total_steps = total_steps
        self._events = events

    def begins(self) -> None:
        """See `StepLoop`: the leader keeps the time."""

    def step_done(self, row: Mapping[str, float], transcripts: Sequence[Transcript] = ()) -> bool:
        """See `StepLoop`."""
        from torch.distributed import gather_object

        while (word := self._heard()) is Word.GIVE_RANDOM_STATE:
            gather_object(random_state())
        return word is Word.GO_ON

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """See `StepLoop`."""
        return asyncio.run_coroutine_threadsafe(work, self._events).result()

    def random_states(self) -> list[dict[str, Any]]:
        """Never asked for: the leader saves."""
        raise NotImplementedError

    def _heard(self) -> Word:
        import torch
        from torch.distributed import broadcast

        word = torch.tensor([Word.STOP])
        broadcast(word, src=0)
        return Word(int(word))


# --- what the others are told --------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """What another process is to train, beside the weights that it starts from."""

    run_id: str
    run_uri: str
    experiment: dict[str, Any]
    data_fingerprint: str
    first_step: int

    @classmethod
    def by(cls, context: RunContext, loop: StepLoop) -> Told:
        """What the run trains."""
        return cls(
            context.run_id,
            context.output_dir,
            context.config.model_dump(mode="json"),
            context.dataset.fingerprint,
            loop.first_step,
        )

    @classmethod
    def read(cls, folder: Path) -> Told:
        """What was written there."""
        return cls(**json.loads((folder / cls.FILE).read_text(encoding="utf-8")))

    def write(self, folder: Path) -> None:
        """Put it where the others look."""
        (folder / self.FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")

    FILE: ClassVar[str] = "run.json"


# --- joining ------------------------------------------------------------------------------------


@contextmanager
def joined(folder: Path, backend: LocalBackend) -> Iterator[None]:
    """Be one of the processes that share the steps; they meet in the folder. Blocks."""
    import torch.distributed as dist

    carriers = "cpu:gloo,cuda:nccl" if backend.model.device.type == "cuda" else "gloo"
    store = dist.FileStore(str(folder / "meeting"), backend.num_processes)
    dist.init_process_group(
        carriers,
        store=store,
        rank=backend.rank,
        world_size=backend.num_processes,
        timeout=NO_LIMIT,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def announced(backend: LocalBackend) -> Iterator[None]:
    """While a trainer is made: how accelerate learns that it is one of several."""
    import torch

    if backend.num_processes == 1:
        yield
        return
    rank, size = str(backend.rank), str(backend.num_processes)
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    told["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # else accelerate sets a number
    before = dict(os.environ)
    os.environ.update(told)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def write_problems(folder: Path, rank: int, problems: Sequence[Problem]) -> None:
    """Leave for the leader what keeps a process from its steps."""
    written = json.dumps([asdict(problem) for problem in problems])
    (folder / f"{rank}.problems.json").write_text(written, encoding="utf-8")


def _read_problems(folder: Path, rank: int) -> list[Problem]:
    file = folder / f"{rank}.problems.json"
    if not file.is_file():
        return []
    return [Problem(**one) for one in json.loads(file.read_text(encoding="utf-8"))]


# --- leading ------------------------------------------------------------------------------------


class Process:
    """One of the other processes, as the leader sees it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank = rank
        self._folder = folder
        self._log = folder / f"{rank}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "algorithms.local.follow", str(folder), str(rank)],
                # Threads of OpenMP that spin take the cores from the other processes.
                env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
                stdin=subprocess.PIPE,  # it ends when this pipe does, however the leader ended
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # a Ctrl-C is for the run
            )

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Wait until it has the model and the rows. Raises what kept it from that."""
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise self.failure()

    def wait_until_over(self) -> bool:
        """Wait until it has ended; whether as it should."""
        return self._process.wait() == 0

    def failure(self) -> FlowtuneError:
        """Why it ended: a mistake that it found, or the end of its log."""
        self._process.wait()
        if problems := _read_problems(self._folder, self.rank):
            return UserError(*problems)
        code = self._process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"exited {code}"
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        words = "\n    ".join(["; its last words:", *lines]) if lines else ""
        return StateLostError(f"process {self.rank} of the run {how}{words}")

    def stop(self) -> None:
        """End it, if it has not ended."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


class Watch:
    """Notices when one of the others ends before its time."""

    def __init__(self, others: Sequence[Process]) -> None:
        self._ended = threading.Event()
        self._lost: list[Process] = []
        for process in others:
            threading.Thread(target=self._look_at, args=(process,), daemon=True).start()

    def cause(self) -> FlowtuneError | None:
        """Why one of them ended, if that is what stopped the step; None if none did."""
        return self._lost[0].failure() if self._ended.wait(STOP_SECONDS) else None

    def _look_at(self, process: Process) -> None:
        if process.wait_until_over():
            return
        self._lost.append(process)
        self._ended.set()
        import torch.distributed as dist

        # NCCL would wait for it; gloo raises by itself.
        if dist.is_initialized() and "nccl" in dist.get_backend_config():
            dist.distributed_c10d._get_default_group().abort()


@contextmanager
def led(context: RunContext, backend: LocalBackend, loop: StepLoop) -> Iterator[Leader]:
    """The run's loop, with the other processes started and joined, if there are any. Blocks.

    Raises UserError for a mistake that one of them found, and StateLostError if one was lost.
    """
    leader = Leader(loop, backend.num_processes)
    if backend.num_processes == 1:
        yield leader
        return
    with tempfile.TemporaryDirectory(prefix="flowtune-processes-") as name, ExitStack() as stack:
        folder = Path(name)
        Told.by(context, loop).write(folder)
        backend.write_start(folder)
        others = []
        for rank in range(1, backend.num_processes):
            others.append(Process(folder, rank))
            stack.callback(others[-1].stop)
        for process in others:
            process.wait_until_ready()
        watch = Watch(others)
        try:
            with joined(folder, backend):
                yield leader
        except FlowtuneError:
            raise
        except Exception as error:
            if (cause := watch.cause()) is not None:
                raise cause from error
            raise
