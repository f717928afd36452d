"""Waits are told once a change, whatever the requests of a process say between them."""

from __future__ import annotations

import asyncio

import pytest

from backends import waiting
from backends.tinker import Server, Submitted
from backends.waiting import Waits

PAUSED = "the server has paused this run's requests: busy"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    return now


def test_a_pause_is_told_when_it_begins_and_when_it_ends(clock: list[float]) -> None:
    waits, heard = Waits(), list[str]()
    with waits.told_to(heard.append):
        waits.queue_state("active", None)
        for _ in range(10):
            waits.queue_state("paused_rate_limit", "busy")
            clock[0] += 30
        waits.queue_state("active", None)
        waits.queue_state("active", None)
    waits.queue_state("paused_rate_limit", "busy")
    assert heard == [PAUSED, "the server goes on after 300 s"]


def test_requests_that_are_paused_by_turns_are_told_of_once_a_minute(clock: list[float]) -> None:
    waits, heard = Waits(), list[str]()
    with waits.told_to(heard.append):
        for _ in range(130):
            waits.queue_state("paused_capacity", "busy")
            waits.queue_state("active", None)
            clock[0] += 1
    assert heard == [PAUSED, "the server goes on after 0 s"] * 3


async def test_an_answer_that_takes_unusually_long_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "SLOW_SECONDS", 0.01)
    waits, heard = Waits(), list[str]()
    monkeypatch.setattr("backends.tinker.WAITS", waits)
    loop = asyncio.get_running_loop()

    async def ask(seconds: float) -> int:
        answer: asyncio.Future[int] = loop.create_future()
        loop.call_later(seconds, answer.set_result, 7)
        return await Submitted(answer, lambda n: n + 1, Server())

    with waits.told_to(heard.append):
        assert await ask(0.0) == 8
        assert heard == []
        assert await ask(0.1) == 8
        assert heard == ["the server has not answered a request for 0 s; still waiting"]
        assert waits.slow_after() >= 0.2
        assert await ask(0.05) == 8
    assert len(heard) == 1
