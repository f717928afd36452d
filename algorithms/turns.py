"""The order of a run's requests: as the recipe reserved them, whoever comes first to submit.

Operations are carried by tasks that start when they like. Each has a place in the queue, reserved
when the recipe reached it, and submits its request when every earlier one has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, TypeVar

from backends.errors import StateLostError

T = TypeVar("T")

Place = tuple[str, int]
"""An operation and its step."""


class Turn:
    """A place in the order of submissions. Entered, it waits until every earlier one has left."""

    def __init__(self, before: asyncio.Future[None]) -> None:
        self._before = before
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> None:
        await asyncio.shield(self._before)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if error is None:
            self.release()
        else:
            self.refuse()

    def release(self) -> None:
        """Let the next one in."""
        if not self.done.done():
            self.done.set_result(None)

    def refuse(self) -> None:
        """Keep the later ones out: what they were to follow never reached the backend."""
        if not self.done.done():
            self.done.set_exception(StateLostError("an earlier operation was never submitted"))
            self.done.exception()  # seen: nobody has to come after it


class Turns:
    """All places of one run, in the order of their reservation."""

    def __init__(self) -> None:
        self._last: asyncio.Future[None] | None = None
        self._open: dict[Place, Turn] = {}
        self._submitted: dict[Place, Awaitable[Any]] = {}

    def reserve(self, place: Place) -> None:
        """The next place, to be taken up by that operation."""
        if self._last is None:
            self._last = asyncio.get_running_loop().create_future()
            self._last.set_result(None)
        turn = Turn(self._last)
        self._last = turn.done
        self._open[place] = turn

    async def submit(self, place: Place, request: Callable[[], Awaitable[T]]) -> Awaitable[T]:
        """Submit in the operation's turn, and once: a retried task waits for the same request."""
        if place not in self._submitted:
            async with self._open[place]:
                self._submitted[place] = request()
        return self._submitted[place]

    async def skip(self, place: Place) -> None:
        """Let the later ones through: there is nothing to submit here."""
        async with self._open[place]:
            pass

    def over(self, place: Place) -> None:
        """The operation has ended; one that did so before its turn must not hold up the others."""
        if (turn := self._open.pop(place, None)) is not None:
            turn.refuse()
        self._submitted.pop(place, None)
