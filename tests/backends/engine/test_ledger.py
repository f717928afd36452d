"""What is remembered, for how long, and who is woken."""

from __future__ import annotations

import asyncio
import time

import pytest

from backends.engine import ledger as rooms
from backends.engine.ledger import Answer, Gone, Ledger, Model, Sampler, Unknown
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
    ticket, _ = ledger.ticket(("train", "m", 1))
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
    ticket, _ = ledger.ticket(("train", "m", 1))
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
    tickets = [ledger.ticket(("train", "m", number))[0] for number in range(10)]
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
    ledger.end_session(session, "has ended")
    with pytest.raises(Gone, match=r"has ended; open a new ServiceClient and go on from a saved"):
        ledger.session(session.id)


def test_what_has_ended_is_remembered_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "MOST_ENDED", 3)
    ledger = Ledger()
    sessions = [ledger.open_session(None, str(number)) for number in range(5)]
    for session in sessions:
        ledger.add_model(Model(f"{session.id}:train:0", session.id, LoraConfig(rank=1)))
        ledger.add_sampler(Sampler(f"{session.id}:sample:0", session.id, None))
        assert [model.session_id for model in ledger.models_of(session)] == [session.id]
        ledger.drop_model(f"{session.id}:train:0", "has gone")
        assert [sampler.id for sampler in ledger.end_session(session, "is over")] == [
            f"{session.id}:sample:0"
        ]
    assert ledger.sessions() == []
    assert ledger.every_session() == sessions[2:]
    assert [model.session_id for model in ledger.every_model()] == [s.id for s in sessions[2:]]
    assert ledger.find_session(sessions[0].id) is None
    assert ledger.find_session(sessions[4].id) is sessions[4]
    with pytest.raises(Unknown, match="may have been restarted"):
        ledger.session(sessions[0].id)
    ledger.add_sampler(Sampler("late", sessions[4].id, None))
    with pytest.raises(Unknown, match="sampler late is not known"):
        ledger.sampler("late")


async def test_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, now = Ledger(), 0.0
    monkeypatch.setattr(rooms, "monotonic", lambda: now)
    session = ledger.open_session(None)
    ledger.add_model(Model("m", session.id, LoraConfig(rank=1)))
    ledger.add_sampler(Sampler("s", session.id, None))
    tickets = [ledger.ticket((kind, name, 1))[0] for kind, name in (("a", "m"), ("b", "s"))]
    assert session.unanswered == 2
    again, _ = ledger.ticket(("a", "m", 1))
    strangers = [ledger.ticket(None)[0], ledger.ticket(("a", "nobody", 1))[0]]
    assert (again, session.unanswered) == (tickets[0], 2)
    for ticket in (*tickets, *tickets, *strangers):
        ledger.settle(ticket, Answer(b""))
    assert session.unanswered == 0
    signs = [
        lambda: ledger.session(session.id),
        lambda: ledger.model("m"),
        lambda: ledger.sampler("s"),
        lambda: ledger.settle(ledger.ticket(("c", session.id, 1))[0], Answer(b"")),
    ]
    for sign in signs:
        now += 1
        sign()
        assert session.last_seen == now
    now += 1
    await ledger.answer(tickets[0].request_id, 0)
    assert session.last_seen == now
    now += 1
    ledger.find_session(session.id)
    ledger.find_model("m")
    await ledger.answer(strangers[0].request_id, 0)
    assert session.last_seen == now - 1
