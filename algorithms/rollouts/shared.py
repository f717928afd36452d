"""Results under way that several callers wait for, by number."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """Each result is worked out once for all who ask; the newest `most` are kept for latecomers.

    Work ends when the last who waits for it is cancelled; what failed is tried anew when asked for
    again.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tasks: dict[int, asyncio.Task[T]] = {}
        self._waiting: dict[int, int] = {}

    async def get(self, number: int, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of a number, from `work` if nobody has asked for it yet."""
        task = self._tasks.get(number)
        if task is None or _failed(task):
            task = self._tasks[number] = asyncio.get_running_loop().create_task(work())
            for old in sorted(self._tasks)[: -self._most]:
                if self._tasks[old].done():
                    del self._tasks[old]
        self._waiting[number] = self._waiting.get(number, 0) + 1
        try:
            return await asyncio.shield(task)
        finally:
            self._waiting[number] -= 1
            if not self._waiting[number]:
                del self._waiting[number]
                task.cancel()


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
