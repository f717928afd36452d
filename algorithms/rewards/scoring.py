"""The one way to score an answer: bounded, within a time limit, and with one kind of error.

Evaluations and on-policy algorithms call `score`, never a verifier itself. What a verifier may have
besides `__call__` is asked for here too: `bind` (a model to judge with), `check_row` (what a row
must hold) and `code` (what else its scores come from).
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from algorithms.data.shapes import Row
from algorithms.rewards.section import VerifierSection
from algorithms.rewards.verifiers import Verifier
from backends.base import Backend, Tokenizer
from backends.errors import FlowtuneError, Problem, UserError

_Places = dict[tuple[str, int], asyncio.Semaphore]
_places: WeakKeyDictionary[asyncio.AbstractEventLoop, _Places] = WeakKeyDictionary()
"""The bound of each kind of verifier, on each event loop."""


@runtime_checkable
class NeedsModel(Protocol):
    """A verifier that asks a model."""

    async def bind(self, backend: Backend, tokenizer: Tokenizer) -> None:
        """Open what it samples from; the tokenizer is that of the model in training."""
        ...


@runtime_checkable
class ChecksRows(Protocol):
    """A verifier that knows what a row must hold, so that `validate` finds a row without it."""

    def check_row(self, row: Row, place: str) -> Problem | None:
        """What it has against a row; None if nothing."""
        ...


@runtime_checkable
class HasCode(Protocol):
    """A verifier whose scores come from more than its own class."""

    def code(self) -> list[object]:
        """The functions and verifiers it calls."""
        ...


async def bind(verifier: Verifier, backend: Backend, tokenizer: Tokenizer) -> None:
    """Give a verifier that asks a model the backend to open it on; others need nothing.

    To be awaited before the first `score`, and again when the backend is another one. Raises what
    opening a sampling client raises.
    """
    if isinstance(verifier, NeedsModel):
        await verifier.bind(backend, tokenizer)


def check_row(verifier: Verifier, row: Row, place: str) -> Problem | None:
    """What a verifier has against a row that is otherwise well formed; None if nothing."""
    return verifier.check_row(row, place) if isinstance(verifier, ChecksRows) else None


def code_behind(verifier: Verifier) -> list[object]:
    """Everything whose source decides the scores: the verifier, and what it calls."""
    if not isinstance(verifier, HasCode):
        return [verifier]
    return [verifier, *verifier.code()]


async def score(
    section: VerifierSection,
    verifier: Verifier,
    row: Row,
    completion: str,
    *,
    where: str,
    place: str,
) -> float:
    """What an answer to a row is worth: a finite number.

    `section` is what `verifier` was built from, `where` names it in the document, and `place` is
    the row's. Raises what `measure` raises; its UserErrors name the row as well.
    """
    try:
        return await measure(section, verifier, row, completion)
    except UserError as error:
        problems = [
            Problem(where, f"{problem.what} (row {place})", problem.remedy)
            for problem in error.problems
        ]
        raise UserError(*problems) from error.__cause__


async def measure(section: VerifierSection, verifier: Verifier, row: Row, completion: str) -> float:
    """A finite number, within the verifier's `timeout_seconds` once it is its turn.

    At most `max_concurrent` answers are scored at a time. A verifier without a coroutine function
    runs in a thread of its own, so that the event loop goes on. Raises UserError, with the kind and
    the cause, if the verifier raises, takes too long, or gives anything but a finite number: that
    is never a reward. TransientError and StateLostError (of a judge's backend) pass through.
    """
    kind, limit = section.kind, section.params.timeout_seconds
    async with _place(section):
        try:
            async with asyncio.timeout(limit) as timer:
                number = float(await _call(verifier, row, completion))
        except UserError as error:
            problems = [Problem("verifier", f"{kind}: {p.what}", p.remedy) for p in error.problems]
            raise UserError(*problems) from error
        except FlowtuneError:
            raise
        except (Exception, SystemExit) as error:
            what = f"{kind} raised {type(error).__name__}: {error}"
            remedy = "mend the verifier or the row"
            if timer.expired():
                what = f"{kind} took longer than {limit:g} seconds"
                remedy = "raise its timeout_seconds, or make the verifier faster"
            raise UserError(Problem("verifier", what, remedy)) from error
    if not math.isfinite(number):
        raise UserError(Problem("verifier", f"{kind} gave {number}", "a reward is a finite number"))
    return number


def _place(section: VerifierSection) -> asyncio.Semaphore:
    """Holds back what is more than the kind's bound; waiting for it takes none of the time."""
    limit = section.params.max_concurrent or section.params.PLACES
    places = _places.setdefault(asyncio.get_running_loop(), {})
    return places.setdefault((section.kind, limit), asyncio.Semaphore(limit))


async def _call(verifier: Verifier, row: Row, completion: str) -> Any:
    if inspect.iscoroutinefunction(type(verifier).__call__):
        return await verifier(row, completion)  # type: ignore[misc]  # the check says so
    reward = await _in_thread(lambda: verifier(row, completion))
    return await reward if inspect.isawaitable(reward) else reward


async def _in_thread(call: Callable[[], Any]) -> Any:
    """The result of a call in a thread that nobody waits for once the time is up.

    Not `asyncio.to_thread`: calls that never end would fill its pool, and keep Python from ending.
    """
    done: Future[Any] = Future()
    done.set_running_or_notify_cancel()  # from here on, giving up leaves it as it is
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _Worker()

    def work() -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001  (raised where the result is awaited)
            _idle.append(worker)
            done.set_exception(error)
        else:
            _idle.append(worker)
            done.set_result(result)

    worker.calls.put(partial(contextvars.copy_context().run, work))
    return await asyncio.wrap_future(done)


class _Worker:
    """A daemon thread for one call after another, for as long as each of them comes back.

    To start a thread for each call would make the event loop wait for every one of them.
    """

    def __init__(self) -> None:
        self.calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._serve, name="verifier", daemon=True).start()

    def _serve(self) -> None:
        while True:
            self.calls.get()()


_idle: list[_Worker] = []
"""Those that wait for a call: no more than were ever busy at the same time."""
