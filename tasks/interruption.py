"""Being asked to stop: Ctrl-C, a worker's SIGTERM, the cancel button of Prefect's UI.

The first time the steps under way are finished, a checkpoint is written and the backend ended, as
far as that takes no longer than `STOP_SECONDS`. The second signal ends the process at once; the
engine notices by the pipe that it watches.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import httpx
from prefect import State
from prefect.client.orchestration import PrefectClient, get_client
from prefect.exceptions import PrefectHTTPStatusError, TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Cancelled

from algorithms.base import RunResult
from algorithms.run import RunStopped
from tasks import session

STOP_SECONDS = 20.0
"""A stop that has not come to a checkpoint by then does without one (workers kill after 30)."""

LOOK_SECONDS = 5.0
"""How often Prefect is asked whether the flow run is to be cancelled."""

EXIT_CODE = 130

logger = logging.getLogger(__name__)


class Interruption:
    """Whether one run was asked to stop, and by what."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._loop = asyncio.get_running_loop()
        self._flow = asyncio.current_task()
        self._words = ""
        self._signal: int | None = None
        self._patience: asyncio.TimerHandle | None = None

    @property
    def asked(self) -> bool:
        """Whether the run was asked to stop."""
        return bool(self._words)

    def on_signal(self, number: int) -> None:
        """Stop in good order; the second time, at once."""
        if self._signal is not None:
            self._end_at_once()
        self._signal = number
        self.ask(f"stopped by {signal.Signals(number).name}")

    def ask(self, words: str) -> None:
        """Finish the steps under way and save; a run that is not open yet just ends."""
        if self.asked:
            return
        self._words = words
        if session.is_open(self._run_id):
            session.live(self._run_id).stop()
            self._patience = self._loop.call_later(STOP_SECONDS, self._give_up)
            again = " (Ctrl-C again: at once)" if self._signal == signal.SIGINT else ""
            session.notify(self._run_id, f"stopping: a checkpoint is written first{again}")
        else:
            self._give_up()

    def _give_up(self) -> None:
        if self._flow is not None:
            self._flow.cancel()

    def over(self) -> None:
        """The run has ended, in whatever way."""
        if self._patience is not None:
            self._patience.cancel()
        if self._flow is not None and self.asked:
            self._flow.uncancel()

    def _end_at_once(self) -> None:
        session.over(RunResult(self._run_id, "cancelled", error="ended at once"))
        os._exit(EXIT_CODE)

    async def state(self) -> State[Any]:
        """What the flow returns.

        A SIGTERM on a worker whose flow run nobody cancelled is something else (a machine that goes
        away, a worker that reschedules): then TerminationSignal is raised, as Prefect itself does.
        """
        on_a_worker = "PREFECT__FLOW_RUN_ID" in os.environ
        if self._signal == signal.SIGTERM and on_a_worker:
            async with get_client() as client:
                if not await _cancelled(client):
                    raise TerminationSignal(signal.SIGTERM)
        return Cancelled(message=f"run {self._run_id}: {self._words}")


@asynccontextmanager
async def interruptible(run_id: str) -> AsyncIterator[Interruption]:
    """Let the run inside be stopped; what it then ends with goes no further than here."""
    interruption = Interruption(run_id)
    looking = asyncio.create_task(_look(interruption))
    try:
        with _signals(interruption):
            yield interruption
    except (RunStopped, asyncio.CancelledError):
        if not interruption.asked:
            raise
    finally:
        interruption.over()
        looking.cancel()


@contextlib.contextmanager
def _signals(interruption: Interruption) -> Iterator[None]:
    """Take SIGINT and SIGTERM from Prefect and asyncio for the block, where they can be had."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        loop.add_signal_handler(number, interruption.on_signal, number)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


async def _look(interruption: Interruption) -> None:
    """Ask Prefect from time to time: a process that no worker watches is told by nobody else."""
    if flow_run.id is None:
        return
    async with get_client() as client:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if await _cancelled(client):
                break
    interruption.ask("cancelled in Prefect")


async def _cancelled(client: PrefectClient) -> bool:
    """Whether someone has cancelled the flow run; False while Prefect does not say."""
    try:
        state = (await client.read_flow_run(UUID(flow_run.id))).state
    except (httpx.HTTPError, PrefectHTTPStatusError) as error:
        logger.info("Prefect did not say whether the run goes on: %s", error)
        return False
    return state is not None and (state.is_cancelling() or state.is_cancelled())
