"""What a process owes the one that started it: one line on stdout, and an end with it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn


class Announcer:
    """Says one line on stdout, if wanted; what others print goes to stderr from then on."""

    def __init__(self, wanted: bool) -> None:
        self._stdout: int | None = None
        if wanted:
            sys.stdout.flush()
            self._stdout = os.dup(1)
            os.dup2(2, 1)

    def __call__(self, **fields: Any) -> None:
        """Say it, as JSON; whatever is said after that is not heard."""
        if self._stdout is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._stdout, json.dumps(fields).encode() + b"\n")
            os.close(self._stdout)
            self._stdout = None


def when_parent_ends(call: Callable[[], object]) -> None:
    """Have a thread call this once the parent has died, or stdin, a pipe that it holds, has ended.

    stdin alone would not do if a fork of the parent lives on and holds the pipe open.
    """
    ends = [0]
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            ends.append(os.pidfd_open(os.getppid()))

    def wait() -> None:
        with contextlib.suppress(OSError):
            while select.select(ends, [], [])[0] == [0] and os.read(0, 4096):
                pass
        with contextlib.suppress(RuntimeError):  # an event loop that is closed by now
            call()

    threading.Thread(target=wait, name="parent", daemon=True).start()


def leave(code: int) -> NoReturn:
    """End without taking the interpreter apart, which takes seconds once torch is in it."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
