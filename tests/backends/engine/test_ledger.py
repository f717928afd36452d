"""What is remembered, for how long, and who is woken."""

from __future__ import annotations

import asyncio
import time

import pytest

from backends.engine import ledger as rooms
from backends.engine.ledger import Answer, Gone, Ledger, Model, Unknown
from backends.engine.records import LoraConfig


def test_a_request_that_is_sent_again_gets_the_first_ones_ticket() -> None:
    ledger = Ledger()
    first, new = ledger.ticket(("train", "m", 1))
    again, new_again = ledger.ticket(("train", "m", 1))
    assert (new, new_again) == (True, False)
    assert again is first
    other, _ = ledger.ticket(("train", "m", 2))
    assert other.request_id != first.request_id
    assert ledger.ticket(None)[0] is not ledger.ticket(None)[0]


async def test_whoever_waits_is_woken_at_once_and_can_ask_again() -> None:
    ledger = Ledger()
    ticket, _ = ledger.ticket("k")
    waiting = [asyncio.create_task(ledger.answer(ticket.request_id, 5)) for _ in range(3)]
    await asyncio.sleep(0.05)
    started = time.perf_counter()
    ledger.settle(ticket, Answer(b"one"))
    answers = await asyncio.gather(*waiting)
    assert time.perf_counter() - started < 0.05
    ledger.settle(ticket, Answer(b"two"))
    answers.append(await ledger.answer(ticket.request_id, 0))
    assert [answer and answer.body for answer in answers] == [b"one"] * 4


async def test_a_wait_ends_with_its_time_or_with_the_engine() -> None:
    ledger = Ledger()
    ticket, _ = ledger.ticket("k")
    assert await ledger.answer(ticket.request_id, 0.01) is None
    waiting = asyncio.create_task(ledger.answer(ticket.request_id, 5))
    await asyncio.sleep(0)
    ledger.close()
    assert await asyncio.wait_for(waiting, 1) is None
    assert await ledger.answer(ticket.request_id, 5) is None


async def test_memory_is_bounded_over_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "MOST_ANSWERS", 500)
    ledger = Ledger()
    for step in range(10_000):
        ticket, _ = ledger.ticket(("train", "m", step))
        ledger.settle(ticket, Answer(bytes(10)))
        assert await ledger.answer(ticket.request_id, 0) is not None
    assert len(ledger._tickets) == len(ledger._by_key) == 500
    with pytest.raises(Gone, match="no longer kept"):
        await ledger.answer(ticket.request_id.rpartition("-")[0] + "-1", 0)
    with pytest.raises(Unknown, match="may have been restarted"):
        await ledger.answer("0123456789ab-1", 0)


async def test_answers_are_bounded_by_size_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "FETCHED_BYTES", 1000)
    ledger = Ledger()
    tickets = [ledger.ticket(number)[0] for number in range(10)]
    for ticket in tickets:
        ledger.settle(ticket, Answer(bytes(300)))
        await ledger.answer(ticket.request_id, 0)
    kept = [ticket for ticket in tickets if ticket.request_id in ledger._tickets]
    assert kept == tickets[-3:]


def test_ids_that_are_not_known_say_so() -> None:
    ledger = Ledger()
    for look in (ledger.session, ledger.model, ledger.sampler):
        with pytest.raises(Unknown, match="nobody is not known to this engine"):
            look("nobody")
    session = ledger.open_session(None)
    ledger.add_model(Model("m", session.id, LoraConfig(rank=1)))
    ledger.drop_model("m", "was unloaded")
    with pytest.raises(Unknown, match="model m: was unloaded"):
        ledger.model("m")
    ledger.finish(session)
    with pytest.raises(Gone, match="has ended"):
        ledger.session(session.id)
