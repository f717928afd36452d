"""The live runs of this process, found by run id.

Clients, tokenizers and batches never are task parameters or results: a task gets a run id and looks
its run up here.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from algorithms.callbacks import Callback
from algorithms.run import LiveRun
from backends.errors import FlowtuneError

logger = logging.getLogger(__name__)

_runs: dict[str, LiveRun] = {}
_watchers: list[Callback] = []


def add(run: LiveRun) -> None:
    """Make a run findable; whoever watches this process watches it from here on."""
    run.callbacks.extend(_watchers)
    _runs[run.run_id] = run


def live(run_id: str) -> LiveRun:
    """The live run; it exists between `open_run` and the end of its flow, in its process only."""
    try:
        return _runs[run_id]
    except KeyError:
        raise LookupError(f"run {run_id!r} is not open in this process") from None


@asynccontextmanager
async def closing(run_id: str) -> AsyncIterator[None]:
    """Whatever way the block ends: write down a failure, end the backend, forget the run.

    What ended the run stays the error that is raised, whatever else then goes wrong.
    """
    try:
        yield
    except BaseException as error:
        if run_id in _runs:
            try:
                _runs[run_id].fail(error)
            except FlowtuneError as second:
                error.add_note(f"It could not be written into the run's folder: {second}")
        raise
    finally:
        run = _runs.pop(run_id, None)
        if run is not None:
            try:
                await run.backend.aclose()
            except FlowtuneError as error:
                logger.warning("the backend of run %s did not close: %s", run_id, error)


@contextmanager
def watch(callback: Callback) -> Iterator[None]:
    """Show every run that is opened inside the block to a callback."""
    _watchers.append(callback)
    try:
        yield
    finally:
        _watchers.remove(callback)
