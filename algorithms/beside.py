"""What runs beside the steps: saves and evaluations, while later steps train.

Steps that have one of these under way are marks. Only so many may lie behind the training at a
time: each holds weights at the server, and files that are on their way to the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

from backends.errors import UserError

T = TypeVar("T")

MARKS_BEHIND = 2
"""So many marks may be under way when the next step is submitted."""


class Beside:
    """The saves and evaluations of a run; the first that fails makes its error everyone's."""

    def __init__(self) -> None:
        self._marks: dict[asyncio.Task[Any], int] = {}
        self._error: BaseException | None = None
        self._failed = asyncio.Event()

    def start(self, steps_done: int, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begin one that belongs to the weights after so many steps."""
        task = asyncio.get_running_loop().create_task(work)
        self._marks[task] = steps_done
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        del self._marks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            if self._error is None:
                self._error = error
            self._failed.set()

    async def room(self) -> None:
        """Wait until few enough marks are under way."""
        while len(set(self._marks.values())) > MARKS_BEHIND:
            await asyncio.wait(self._marks, return_when=asyncio.FIRST_COMPLETED)

    async def failure(self) -> NoReturn:
        """Raise the first error, whenever it comes."""
        await self._failed.wait()
        assert self._error is not None
        raise self._error

    async def settle(self) -> None:
        """Wait until all are done. Raises the first error as soon as there is one."""
        while self._marks and self._error is None:
            await asyncio.wait(self._marks, return_when=asyncio.FIRST_COMPLETED)
        if self._error is not None:
            raise self._error

    async def cancel(self) -> None:
        """End all that are still under way, and wait until they have."""
        tasks = list(self._marks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Await what is not to be left half-done; a cancellation is passed on when it is over."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """What ended a group: a user's mistake if there is one, since the others follow from it."""
    mistakes = [error for error in errors.exceptions if isinstance(error, UserError)]
    return (mistakes or errors.exceptions)[0]
