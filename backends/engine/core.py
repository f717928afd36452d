"""What the engine's services share: its parts, and how a ticket is queued, refused and answered.

The services (`models`, `training`, `storing`, `sampling`) say what each request means. Their
methods are called on the event loop. Those that return a `Ticket` have queued the work, and its
answer comes by the ledger. A mistake in a request is an answer too, given at once, and it uses up
the request's number, so that the model's next operation is not held up. Raised are only `Unknown`
and `Gone`, for ids that are not known here, and `UserError` where there is no ticket to fail.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from backends.engine import wire
from backends.engine.abstract import AbstractBackend
from backends.engine.checkpoints import CheckpointStore
from backends.engine.ledger import Answer, Ledger, Model, Sampler, Ticket
from backends.engine.records import Capabilities, RequestError, SampleRequest
from backends.engine.scheduler import Job, PastTurn, Scheduler
from backends.errors import StateLostError, UserError

log = logging.getLogger("flowtune.engine")

T = TypeVar("T")


class Failed(Exception):
    """A backend's RequestError on its way to the answer."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(frozen=True, slots=True)
class Sampling:
    """A sample that waits for its batch."""

    ticket: Ticket
    sampler: Sampler
    request: SampleRequest
    last_n: int | None
    targets: wire.TargetsBody | None


class Alarm:
    """Calls at the earliest of the moments that it was set to; there is one timer at most."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
        self._loop = loop
        self._call = call
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> None:
        """Call after so many seconds, if not earlier."""
        when = self._loop.time() + seconds
        if self._timer is None or when < self._timer.when():
            self.cancel()
            self._timer = self._loop.call_at(when, self._ring)

    def cancel(self) -> None:
        """Do not call."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        self._call()


class Core:
    """One base model's ledger, scheduler, store and backend. Made on the event loop."""

    def __init__(self, base_model: str, store: CheckpointStore) -> None:
        self.base_model = base_model
        self.ledger = Ledger()
        self.store = store
        self.loop = asyncio.get_running_loop()
        self.run_samples: Callable[[Callable[[], Sequence[Sampling]]], None] | None = None
        self.scheduler: Scheduler[Sampling] = Scheduler(self._run_samples)
        self.capabilities: Capabilities | None = None
        self._io = ThreadPoolExecutor(4, "store")
        self._backend: AbstractBackend | None = None
        self._alarms: list[Alarm] = []

    # -- life --

    async def load(self, make: Callable[[], AbstractBackend]) -> None:
        """Make the backend, on the thread that computes; from then on the engine is ready."""

        def run() -> Capabilities:
            self._backend = make()
            return self._backend.capabilities()

        self.capabilities = await self.scheduler.call(run)

    def stop(self) -> None:
        """Take up nothing more and wake whoever waits; what runs is finished."""
        for alarm in self._alarms:
            alarm.cancel()
        self.scheduler.stop()
        self.ledger.close()

    async def stopped(self, timeout_seconds: float) -> bool:
        """Wait until nothing runs any more and what was saved is published; whether that is so."""
        stopped = await asyncio.to_thread(self.scheduler.wait_stopped, timeout_seconds)
        await asyncio.sleep(0)  # the last job's result may be a checkpoint to publish
        if stopped:
            await asyncio.to_thread(self._io.shutdown)
        return stopped

    @property
    def backend(self) -> AbstractBackend:
        """The compute. It is called on the compute thread only."""
        assert self._backend is not None, "requests are taken once the model is loaded"
        return self._backend

    @property
    def limits(self) -> Capabilities:
        """What the backend can do."""
        assert self.capabilities is not None, "requests are taken once the model is loaded"
        return self.capabilities

    def alarm(self, call: Callable[[], object]) -> Alarm:
        """An alarm that the engine's end silences."""
        alarm = Alarm(self.loop, call)
        self._alarms.append(alarm)
        return alarm

    def in_io(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run what may block on the store, beside the event loop and the computing."""
        return self.loop.run_in_executor(self._io, function)

    def _run_samples(self, arriving: Callable[[], Sequence[Sampling]]) -> None:
        assert self.run_samples is not None
        self.run_samples(arriving)

    # -- tickets --

    def numbered(self, model: Model, seq_id: int | None) -> tuple[Ticket, bool]:
        """The ticket of an operation on a model, and whether it is new."""
        number: Hashable = seq_id if seq_id is not None else object()  # none is like no other
        return self.ledger.ticket(("train", model.id, number))

    def queue(self, model: Model, ticket: Ticket, seq_id: int | None, job: Job) -> Ticket:
        """Queue a job in its model's lane; a number that is too late is the user's mistake."""
        try:
            self.scheduler.submit(model.id, seq_id, job)
        except PastTurn as error:
            self.refuse(ticket, f"seq_id: {error}; create a new training client")
        return ticket

    def change(
        self,
        model: Model,
        ticket: Ticket,
        seq_id: int | None,
        run: Callable[[], T],
        encode: Callable[[T], Answer],
        prepare: Callable[[], Any] | None = None,
    ) -> Ticket:
        """Queue what changes a model. An error that nobody expected leaves its state in doubt."""

        def guarded() -> T:
            check_sound(model)
            try:
                return run()
            except (UserError, Failed):
                raise
            except Exception as error:
                model.broken = (
                    f"the state of model {model.id} is in doubt since an operation failed "
                    f"({type(error).__name__}: {error}); load a checkpoint into a new model"
                )
                raise

        def done(result: Any) -> None:
            self.settle(ticket, result, encode)

        return self.queue(model, ticket, seq_id, Job(guarded, done, prepare))

    def refuse(
        self, ticket: Ticket, problem: str, model: Model | None = None, seq_id: int | None = None
    ) -> Ticket:
        """Answer with a user's mistake, at once; with a model given, its number is used up too."""
        self.ledger.settle(ticket, _error(problem, "user"))
        if model is not None and seq_id is not None:
            self.queue(model, ticket, seq_id, Job(nothing, logged))
        return ticket

    def refuse_unread(self, error: wire.BadBody) -> Ticket:
        """The ticket of an operation whose body could not be read. Raises Unknown."""
        if error.model_id is None:
            return self.refuse(self.ledger.ticket(None)[0], str(error))
        model = self.ledger.model(error.model_id)
        ticket, new = self.numbered(model, error.seq_id)
        return self.refuse(ticket, str(error), model, error.seq_id) if new else ticket

    def settle(self, ticket: Ticket, result: Any, encode: Callable[[Any], Answer]) -> None:
        """Answer a ticket with a result, or with what went wrong and whose mistake it is."""
        if not isinstance(result, BaseException | RequestError):
            try:
                return self.ledger.settle(ticket, encode(result))
            except Exception as error:  # noqa: BLE001  (it is the answer)
                result = error
        if isinstance(result, Failed):
            result = result.error
        if isinstance(result, RequestError):
            answer = _error(result.message, result.category)
        elif isinstance(result, UserError):
            answer = _error(str(result), "user")
        elif isinstance(result, StateLostError):
            answer = _error(str(result), "server")
        else:
            log.error("request %s failed", ticket.request_id, exc_info=result)
            answer = _error(f"{type(result).__name__}: {result}", "server")
        self.ledger.settle(ticket, answer)

    # -- checks --

    def check_base_model(
        self, base_model: str, optimizer: wire.OptimizerBody | None = None
    ) -> str | None:
        """Why a model of this kind cannot be had here, or None."""
        if not self._serves(base_model):
            return (
                f"base_model: this engine does not serve {base_model[:300]!r}; ask for "
                f"{self.base_model!r}, or start an engine with --base-model {base_model[:300]}"
            )
        if optimizer is not None and optimizer.type != "adamw":
            return f"optimizer_config.type: is {optimizer.type[:80]!r}; this engine has adamw"
        return None

    def _serves(self, base_model: str) -> bool:
        """Whether the name is that of the engine's model, or another path to its folder."""
        if base_model == self.base_model:
            return True
        ours, theirs = Path(self.base_model), Path(base_model)
        try:
            return ours.is_dir() and theirs.is_dir() and ours.samefile(theirs)
        except (OSError, ValueError):
            return False


def check_sound(model: Model) -> None:
    """Raises StateLostError if an operation has left the model's state in doubt."""
    if model.broken is not None:
        raise StateLostError(model.broken)


def nothing() -> None:
    """The job of a request that was refused: its number is used up."""


def logged(result: Any) -> None:
    """For jobs that nobody waits for."""
    if isinstance(result, Exception) and not isinstance(result, UserError):
        log.error("a job failed", exc_info=result)


def json_answer(**fields: Any) -> Answer:
    """An answer in JSON."""
    return Answer(json.dumps(fields).encode())


def always(answer: Answer) -> Callable[[object], Answer]:
    """For jobs whose answer is known beforehand, if they succeed."""
    return lambda _: answer


def _error(message: str, category: str) -> Answer:
    return json_answer(error=message, category=category)
