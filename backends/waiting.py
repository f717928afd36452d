"""Waiting for a server that is slow, or that has paused its clients: told to whoever watches.

A server of the Tinker protocol says in its `try_again` answers whether a request is worked on or
held back, and why. The SDK goes on asking, for ever, and writes a line into a log after 15 minutes;
here the same is told at once, and then only when it changes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

SLOW_SECONDS: Final = 60.0
"""An answer that takes longer is told of, if it also takes twice as long as any before it."""
QUIET_SECONDS: Final = 60.0
"""A pause that ends and comes back within these, as with many requests at once, is no news."""
REASONS: Final = {
    "paused_capacity": "it is short of capacity",
    "paused_rate_limit": "too many clients of this account are at work",
}


class Waits:
    """What the requests of this process wait for; may be told from any thread."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[str], None]] = []
        self._lock = threading.Lock()
        self._paused: str | None = None
        self._since = 0.0
        self._before: tuple[str, float] = ("", 0.0)
        """The pause that ended last, and when."""
        self._longest_answer_seconds = 0.0

    @contextmanager
    def told_to(self, listener: Callable[[str], None]) -> Iterator[None]:
        """Call the listener with a line for every change, from whatever thread it is seen in."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def queue_state(self, state: str, reason: str | None) -> None:
        """What the server said of a request: `active`, or one of the pauses and why."""
        with self._lock:
            words = self._change(state, reason, time.monotonic())
        if words is not None:
            self._tell(words)

    def _change(self, state: str, reason: str | None, now: float) -> str | None:
        if state in REASONS:
            paused = f"the server has paused this run's requests: {reason or REASONS[state]}"
            last, ended = self._before
            if paused == self._paused or (paused == last and now - ended < QUIET_SECONDS):
                return None
            if self._paused is None:
                self._since = now
            self._paused = paused
            return paused
        if self._paused is None:
            return None
        self._before, self._paused = (self._paused, now), None
        return f"the server goes on after {now - self._since:.0f} s"

    def slow_after(self) -> float:
        """After how long an answer is worth a word (s)."""
        return max(SLOW_SECONDS, 2 * self._longest_answer_seconds)

    def slow(self, seconds: float) -> None:
        """An answer has not come for so long."""
        self._tell(f"the server has not answered a request for {seconds:.0f} s; still waiting")

    def answered(self, seconds: float) -> None:
        """An answer came after so long."""
        self._longest_answer_seconds = max(self._longest_answer_seconds, seconds)

    def _tell(self, words: str) -> None:
        for listener in tuple(self._listeners):
            listener(words)


WAITS: Final = Waits()


@cache
def listen_to_sdk() -> None:
    """Have the SDK's own observers of the queue's state tell `WAITS` what they are told.

    The SDK makes them itself, one for each client and each creation of a model, and takes none.
    """
    from tinker import SamplingClient
    from tinker.lib.queue_state_logger import QueueStateLogger

    for observer in (QueueStateLogger, SamplingClient):
        _listen(observer)


def _listen(observer: type[Any]) -> None:
    own = observer.on_queue_state_change

    def told(self: Any, queue_state: Any, queue_state_reason: str | None) -> None:
        own(self, queue_state, queue_state_reason)
        WAITS.queue_state(queue_state.value, queue_state_reason)

    observer.on_queue_state_change = told
