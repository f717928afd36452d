"""The live runs of this process, found by run id.

Clients, tokenizers and batches never are task parameters or results: a task gets a run id and looks
its run up here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from prefect import get_run_logger

from algorithms.base import RunResult
from algorithms.callbacks import Callback
from algorithms.run import LiveRun
from backends.errors import FlowtuneError
from backends.storage.lease import LeaseLost
from backends.waiting import WAITS

CLOSE_SECONDS = 20.0
"""How long a backend may take to end its session before it is left to itself."""

logger = logging.getLogger(__name__)

_runs: dict[str, LiveRun] = {}
_watchers: list[Callback] = []


def add(run: LiveRun) -> None:
    """Make a run findable; whoever watches this process watches it from here on."""
    run.callbacks.extend(_watchers)
    _runs[run.run_id] = run


def replace(run: LiveRun) -> None:
    """Put a run that was opened again in the place of the one that was lost."""
    _runs[run.run_id] = run


def live(run_id: str) -> LiveRun:
    """The live run; it exists between `open_run` and the end of its flow, in its process only."""
    try:
        return _runs[run_id]
    except KeyError:
        raise LookupError(f"run {run_id!r} is not open in this process") from None


def is_open(run_id: str) -> bool:
    """Whether the run is live in this process."""
    return run_id in _runs


@asynccontextmanager
async def closing(run_id: str) -> AsyncIterator[None]:
    """Whatever way the block ends: write down a failure, end the backend, forget the run.

    What ended the run stays the error that is raised, whatever else then goes wrong.
    """
    try:
        yield
    except BaseException as error:
        if run_id in _runs:
            if isinstance(error, asyncio.CancelledError):
                _runs[run_id].store.objects.hurry()  # who stops a run does not wait for its store
            await _runs[run_id].cancel()
            try:
                result = await asyncio.to_thread(_runs[run_id].fail, error)
                if result.status == "failed" and not isinstance(error, LeaseLost):
                    # That is the run which people ask about.
                    await asyncio.to_thread(_report, _runs[run_id], result)
            except FlowtuneError as second:
                error.add_note(f"It could not be written into the run's folder: {second}")
        raise
    finally:
        run = _runs.pop(run_id, None)
        if run is not None:
            await close_backend(run)


def _report(run: LiveRun, result: RunResult) -> None:
    from tasks.report import write_report  # here, as that module imports this one

    write_report(run.store, result.status, run.algorithm.setup_metrics(), result.error)


async def close_backend(run: LiveRun) -> None:
    """End the run's backend; one that does not answer is left to itself, with a line in the log."""
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await run.backend.aclose()
    except (FlowtuneError, TimeoutError) as error:
        logger.warning("the backend of run %s did not close: %r", run.run_id, error)


def notify(run_id: str, words: str) -> None:
    """Tell everyone who watches the run, or will once it is open."""
    if run_id in _runs:
        _runs[run_id].tell("on_notice", words)
    else:
        for callback in _watchers:
            callback.on_notice(words)


@asynccontextmanager
async def telling_of_waits(run_id: str) -> AsyncIterator[None]:
    """Show what the run waits for at its server, on the terminal and in Prefect's log."""
    loop, log = asyncio.get_running_loop(), get_run_logger()

    def show(words: str) -> None:
        log.warning("run %s: %s", run_id, words)
        notify(run_id, words)

    def hear(words: str) -> None:  # in the SDK's thread
        loop.call_soon_threadsafe(show, words)

    with WAITS.told_to(hear):
        yield


def over(result: RunResult) -> None:
    """Tell everyone who watches that the process ends here and now."""
    for callback in _watchers:
        callback.on_end(result)


@contextmanager
def watch(callback: Callback) -> Iterator[None]:
    """Show every run that is opened inside the block to a callback."""
    _watchers.append(callback)
    try:
        yield
    finally:
        _watchers.remove(callback)
