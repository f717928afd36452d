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
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from algorithms.base import RunContext, StepLoop, Transcript
from algorithms.local.randomness import random_state
from backends.errors import FlowtuneError, Problem, StateLostError, UserError
from backends.local import LocalBackend

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

STOP_SECONDS = 5.0
"""How long a process may take to end by itself, or to be seen to have ended."""

SEEN_SECONDS = 0.2
"""How long after a process has ended this one has surely seen it."""

LOG_LINES_SHOWN = 15

STEP_LIMIT = timedelta(minutes=30)
"""How long one process may be behind another within a step, and when they meet."""

EVALUATION_LIMIT = timedelta(days=30)
"""How long the others wait for the leader's word: it evaluates and saves meanwhile."""


class Word(IntEnum):
    """What the leader says after a step."""

    STOP = 0
    GO_ON = 1
    GIVE_RANDOM_STATE = 2


# --- the run's loop, as each process sees it ----------------------------------------------------


class Leader:
    """The loop of the process that has the run: what is decided here, all processes do."""

    def __init__(self, loop: StepLoop, words: ProcessGroup | None) -> None:
        self.first_step = loop.first_step
        self.total_steps = loop.total_steps
        self._loop = loop
        self._words = words

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
        if self._words is None:
            return [random_state()]
        from torch.distributed import gather_object

        self._say(Word.GIVE_RANDOM_STATE)
        states: list[Any] = [None] * self._words.size()
        gather_object(random_state(), states, group=self._words)
        return states

    def _say(self, word: Word) -> None:
        if self._words is not None:
            import torch
            from torch.distributed import broadcast

            broadcast(torch.tensor([word]), src=0, group=self._words)


class Follower:
    """The loop of every other process: it has the same rows, and waits for the leader's word."""

    def __init__(
        self,
        first_step: int,
        total_steps: int,
        events: asyncio.AbstractEventLoop,
        words: ProcessGroup,
    ) -> None:
        self.first_step = first_step
        self.total_steps = total_steps
        self._events = events
        self._words = words

    def begins(self) -> None:
        """See `StepLoop`: the leader keeps the time."""

    def step_done(self, row: Mapping[str, float], transcripts: Sequence[Transcript] = ()) -> bool:
        """See `StepLoop`."""
        from torch.distributed import gather_object

        while (word := self._heard()) is Word.GIVE_RANDOM_STATE:
            gather_object(random_state(), group=self._words)
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
        broadcast(word, src=0, group=self._words)
        return Word(int(word))


# --- what the others are told --------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """What another process is to train, beside the weights that it starts from."""

    FILE: ClassVar[str] = "run.json"

    run_id: str
    output_dir: str
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


# --- joining ------------------------------------------------------------------------------------


@contextmanager
def joined(folder: Path, backend: LocalBackend) -> Iterator[ProcessGroup]:
    """Be one of the processes that share the steps; they meet in the folder. Blocks.

    Gives what the leader's words go through.
    """
    import torch.distributed as dist

    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)  # a hostname may lead nowhere
    with _environment({"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback)}):
        dist.init_process_group(
            "nccl" if backend.model.device.type == "cuda" else "gloo",
            store=dist.FileStore(str(folder / "meeting"), backend.num_processes),
            rank=backend.rank,
            world_size=backend.num_processes,
            timeout=STEP_LIMIT,
        )
        try:
            words = dist.new_group(backend="gloo", timeout=EVALUATION_LIMIT)
        except BaseException:
            dist.destroy_process_group()
            raise
    try:
        yield words
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
    with _environment(told):
        yield


@contextmanager
def _environment(told: Mapping[str, str | None]) -> Iterator[None]:
    """With these variables, those that have a value; afterwards all are as they were."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in told.items() if value is not None})
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
        # Threads of OpenMP that spin take the cores from the other processes. What a process that
        # is killed leaves behind goes with the folder.
        env = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "TMPDIR": str(folder)}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "algorithms.local.follow", str(folder), str(rank)],
                env=env,
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

    def wait_until_over(self, seconds: float | None = None) -> bool:
        """Wait until it has ended, so long at most; whether it has, as it should."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds) == 0
        return False

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

    def check(self, seconds: float) -> None:
        """Wait so long for one of them to be seen to have ended; raises why, if one has."""
        if self._ended.wait(seconds):
            raise self._lost[0].failure()

    def _look_at(self, process: Process) -> None:
        if process.wait_until_over():
            return
        self._lost.append(process)
        self._ended.set()
        import torch.distributed as dist

        # NCCL would wait for it; gloo raises by itself.
        if dist.is_initialized() and dist.get_backend() == "nccl":
            dist.group.WORLD.abort()


@contextmanager
def led(context: RunContext, backend: LocalBackend, loop: StepLoop) -> Iterator[Leader]:
    """The run's loop, with the other processes started and joined, if there are any. Blocks.

    Raises UserError for a mistake that one of them found, and StateLostError if one was lost.
    """
    if backend.num_processes == 1:
        yield Leader(loop, None)
        return
    with tempfile.TemporaryDirectory(prefix="flowtune-processes-") as name, ExitStack() as stack:
        folder = Path(name)
        Told.by(context, loop).write(folder)
        backend.write_start(folder)
        backend.at_close.append(stack.close)  # a run that is cancelled does not wait for them
        others = []
        for rank in range(1, backend.num_processes):
            others.append(Process(folder, rank))
            stack.callback(others[-1].stop)
        watch = Watch(others)
        for process in others:
            process.wait_until_ready()
        watch.check(SEEN_SECONDS)  # they have waited for each other, one of them perhaps in vain
        try:
            with joined(folder, backend) as words:
                yield Leader(loop, words)
        except RuntimeError as error:
            if _of_a_collective(error):
                watch.check(STOP_SECONDS)
            raise
        for process in others:
            process.wait_until_over(STOP_SECONDS)


def _of_a_collective(error: RuntimeError) -> bool:
    """Whether it may come of another process's end."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or "gloo" in str(error)
