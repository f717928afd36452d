"""What the engine remembers: sessions, models, samplers, and requests with their answers.

It lives in memory, on the event loop's thread. What it holds cannot outlive the process anyway: a
restarted engine has none of the models that requests were numbered for, and the checkpoints in the
store are found by their manifests. A request is known by its key, so that one that is sent again
gets the first one's ticket and is not done a second time.

    LookupError
    ├── Unknown      no session, model, sampler or request of that id is known here
    └── Gone         it was here, and has been let go
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from backends.engine.records import LoraConfig

FETCHED_BYTES = 64 * 2**20
"""How much of the answers that were fetched is kept, in case one was lost on its way."""
WAITING_BYTES = 1024 * 2**20
"""How much of the answers that nobody fetched is kept."""
MOST_ANSWERS = 8192
"""Most answers kept of either kind."""


class Unknown(LookupError):
    """There is no such thing here; the message says what it was and what to do."""


class Gone(LookupError):
    """It was here and is no longer kept."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request came to, ready to be sent."""

    body: bytes
    media_type: str = "application/json"


@dataclass(slots=True, eq=False)
class Ticket:
    """One request whose answer is fetched later. Times are `time.monotonic()`."""

    request_id: str
    key: Hashable
    created: float
    answer: Answer | None = None
    fetched: float | None = None
    """When the answer was first given out."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class Session:
    """One client's session; it owns models and unnamed samplers."""

    id: str
    user_metadata: dict[str, Any]
    last_seen: float
    created: datetime = field(default_factory=lambda: datetime.now(UTC))
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)
    finished: bool = False


@dataclass(slots=True, eq=False)
class Model:
    """A model as clients know it. From `version` on, fields are the compute thread's to write."""

    id: str
    session_id: str
    lora: LoraConfig
    user_metadata: dict[str, Any] = field(default_factory=dict)
    created: datetime = field(default_factory=lambda: datetime.now(UTC))
    version: int = 0
    broken: str | None = None
    """Why its state can no longer be trusted."""
    failed_passes: list[Ticket] = field(default_factory=list)
    """Passes since the last optimizer step that failed."""


@dataclass(slots=True, eq=False)
class Sampler:
    """A sampling session: which weights it draws from (None: the base model)."""

    id: str
    session_id: str
    weights_id: str | None
    model_path: str | None = None


class Ledger:
    """All of it. Nothing here blocks; only `answer` waits."""

    def __init__(self) -> None:
        self._instance = uuid.uuid4().hex[:12]
        self._count = 0
        self._sessions: dict[str, Session] = {}
        self._models: dict[str, Model] = {}
        self._samplers: dict[str, Sampler] = {}
        self._unloaded: OrderedDict[str, str] = OrderedDict()
        self._tickets: dict[str, Ticket] = {}
        self._by_key: dict[Hashable, Ticket] = {}
        self._fetched = _Shelf(FETCHED_BYTES)
        self._waiting = _Shelf(WAITING_BYTES)
        self._closed = False

    # -- sessions, models, samplers --

    def open_session(self, user_metadata: dict[str, Any] | None) -> Session:
        """A new session. Ids are unique across engines, as they name folders in the store."""
        session = Session(str(uuid.uuid4()), user_metadata or {}, time.monotonic())
        self._sessions[session.id] = session
        return session

    def session(self, session_id: str) -> Session:
        """The session, which is noted to be alive. Raises Unknown or Gone."""
        session = self._sessions.get(session_id)
        if session is None:
            raise Unknown(_lost("session", session_id))
        if session.finished:
            raise Gone(f"session {session_id} has ended; open a new ServiceClient")
        session.last_seen = time.monotonic()
        return session

    def add_model(self, model: Model) -> None:
        """Make a model known, under its session."""
        self._models[model.id] = model
        self._sessions[model.session_id].models.append(model.id)

    def model(self, model_id: str) -> Model:
        """The model. Raises Unknown."""
        model = self._models.get(model_id)
        if model is None:
            why = self._unloaded.get(model_id)
            raise Unknown(f"model {model_id}: {why}" if why else _lost("model", model_id))
        return model

    def drop_model(self, model_id: str, why: str) -> None:
        """Forget a model; `why` is what later requests for it are told."""
        model = self._models.pop(model_id, None)
        if model is not None:
            self._sessions[model.session_id].models.remove(model_id)
            self._unloaded[model_id] = why
            if len(self._unloaded) > MOST_ANSWERS:
                self._unloaded.popitem(last=False)

    def add_sampler(self, sampler: Sampler) -> None:
        """Make a sampling session known, under its session."""
        if sampler.id not in self._samplers:
            self._sessions[sampler.session_id].samplers.append(sampler.id)
        self._samplers[sampler.id] = sampler

    def sampler(self, sampler_id: str) -> Sampler:
        """The sampling session. Raises Unknown."""
        sampler = self._samplers.get(sampler_id)
        if sampler is None:
            raise Unknown(_lost("sampler", sampler_id))
        return sampler

    def finish(self, session: Session) -> list[Sampler]:
        """End a session; returns its samplers, which are forgotten. Models are dropped one by one.

        The session itself is remembered, so that a late heartbeat is told to stop.
        """
        session.finished = True
        ended = [self._samplers.pop(sampler_id) for sampler_id in session.samplers]
        session.samplers.clear()
        return ended

    # -- requests --

    def ticket(self, key: Hashable) -> tuple[Ticket, bool]:
        """The ticket under this key, and whether it is new. None as key is always new."""
        known = self._by_key.get(key) if key is not None else None
        if known is not None:
            return known, False
        self._count += 1
        ticket = Ticket(f"{self._instance}-{self._count}", key, time.monotonic())
        self._tickets[ticket.request_id] = ticket
        if key is not None:
            self._by_key[key] = ticket
        return ticket, True

    def settle(self, ticket: Ticket, answer: Answer) -> None:
        """Give a ticket its answer and wake whoever waits for it. The first answer stays."""
        if ticket.answer is not None:
            return
        ticket.answer = answer
        ticket.settled.set()
        self._shelve(self._waiting, ticket)

    async def answer(self, request_id: str, timeout_seconds: float) -> Answer | None:
        """The answer, as soon as it is there; None after the timeout or when the engine stops.

        An answer can be fetched again for a while. Raises Unknown, or Gone once it was let go.
        """
        ticket = self._tickets.get(request_id)
        if ticket is None:
            raise self._no_ticket(request_id)
        if ticket.answer is None and not self._closed:
            try:
                async with asyncio.timeout(timeout_seconds):
                    await ticket.settled.wait()
            except TimeoutError:
                return None
        if ticket.answer is not None and ticket.fetched is None:
            ticket.fetched = time.monotonic()
            self._waiting.take(ticket)
            self._shelve(self._fetched, ticket)
        return ticket.answer

    @property
    def closed(self) -> bool:
        """Whether the engine stops."""
        return self._closed

    def close(self) -> None:
        """Wake everyone who waits: no more answers come."""
        self._closed = True
        for ticket in self._tickets.values():
            ticket.settled.set()

    def _shelve(self, shelf: _Shelf, ticket: Ticket) -> None:
        for old in shelf.put(ticket):
            del self._tickets[old.request_id]
            if old.key is not None:
                del self._by_key[old.key]

    def _no_ticket(self, request_id: str) -> LookupError:
        instance, _, number = request_id.rpartition("-")
        if instance == self._instance and number.isdecimal() and int(number) <= self._count:
            return Gone(f"the answer to request {request_id} was fetched and is no longer kept")
        return Unknown(_lost("request", request_id))


class _Shelf:
    """Answered tickets, oldest first, up to a number and a size."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._tickets: OrderedDict[str, Ticket] = OrderedDict()

    def put(self, ticket: Ticket) -> list[Ticket]:
        """Add a ticket; returns those that had to make room. The newest always stays."""
        self._tickets[ticket.request_id] = ticket
        self._bytes += _size(ticket)
        gone = []
        while len(self._tickets) > 1 and (
            self._bytes > self._most_bytes or len(self._tickets) > MOST_ANSWERS
        ):
            _, old = self._tickets.popitem(last=False)
            self._bytes -= _size(old)
            gone.append(old)
        return gone

    def take(self, ticket: Ticket) -> None:
        """Take a ticket off, if it is here."""
        if self._tickets.pop(ticket.request_id, None) is not None:
            self._bytes -= _size(ticket)


def _size(ticket: Ticket) -> int:
    return len(ticket.answer.body) if ticket.answer is not None else 0


def _lost(what: str, name: str) -> str:
    return (
        f"{what} {name[:300]} is not known to this engine; it may have been restarted since: "
        "open a new client and go on from a saved checkpoint"
    )
