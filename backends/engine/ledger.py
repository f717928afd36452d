"""What the engine remembers: sessions, models, samplers, and requests with their answers.

It lives in memory, on the event loop's thread. What it holds cannot outlive the process anyway: a
restarted engine has none of the models that requests were numbered for, and the checkpoints in the
store are found by their manifests. A request is known by its key, so that one that is sent again
gets the first one's ticket and is not done a second time.

A session is alive while its client shows signs of life: any request for it or for what it owns, and
every answer that comes. Sessions and models that have ended are remembered for a while, so that
whoever still asks for them is told why.

    LookupError
    ├── Unknown      no session, model, sampler or request of that id is known here
    └── Gone         it was here, and has been let go
"""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import monotonic
from typing import Any, TypeVar

from backends.engine.records import LoraConfig

T = TypeVar("T")

FETCHED_BYTES = 64 * 2**20
"""How much of the answers that were fetched is kept, in case one was lost on its way."""
WAITING_BYTES = 1024 * 2**20
"""How much of the answers that nobody fetched is kept."""
MOST_ANSWERS = 8192
"""Most answers kept of either kind."""
MOST_ENDED = 8192
"""How many sessions, and how many models, are remembered once they have ended."""

Key = tuple[Hashable, ...]
"""A request's: what it does, the id of the session, model or sampler that it is for, its number."""


def _now() -> datetime:
    return datetime.now(UTC)


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
    key: Key | None
    created: float
    session: Session | None = None
    """Whose client waits for it."""
    answer: Answer | None = None
    fetched: float | None = None
    """When the answer was first given out."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class Session:
    """One client's session; it owns models and unnamed samplers. Their ids stay when they go."""

    id: str
    user_metadata: dict[str, Any]
    last_seen: float
    """The last sign of life, as `time.monotonic()`."""
    display_name: str | None = None
    created: datetime = field(default_factory=_now)
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)
    unanswered: int = 0
    """How many of its requests have no answer yet."""
    ended: str | None = None
    """How it ended, as in: session x …"""
    reason: str | None = None
    """Success, errored or interrupted, if its client ended it."""
    detail: str | None = None


@dataclass(slots=True, eq=False)
class Model:
    """A model as clients know it. From `version` on, fields are the compute thread's to write."""

    id: str
    session_id: str
    lora: LoraConfig
    user_metadata: dict[str, Any] = field(default_factory=dict)
    created: datetime = field(default_factory=_now)
    last_request: datetime = field(default_factory=_now)
    made: bool = False
    """Whether it ever was there to be trained."""
    ended: str | None = None
    """Why it is no longer there, as in: model x …"""
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
        self._ended_sessions: OrderedDict[str, Session] = OrderedDict()
        self._ended_models: OrderedDict[str, Model] = OrderedDict()
        self._tickets: dict[str, Ticket] = {}
        self._by_key: dict[Key, Ticket] = {}
        self._fetched = _Shelf(FETCHED_BYTES)
        self._waiting = _Shelf(WAITING_BYTES)
        self._closed = False

    # -- sessions, models, samplers --

    def open_session(
        self, user_metadata: dict[str, Any] | None, display_name: str | None = None
    ) -> Session:
        """A new session. Ids are unique across engines, as they name folders in the store."""
        session = Session(str(uuid.uuid4()), user_metadata or {}, monotonic(), display_name)
        self._sessions[session.id] = session
        return session

    def session(self, session_id: str) -> Session:
        """The session, which is noted to be alive. Raises Unknown or Gone."""
        session = self._sessions.get(session_id)
        if session is None:
            ended = self._ended_sessions.get(session_id)
            if ended is None:
                raise Unknown(_lost("session", session_id))
            remedy = "open a new ServiceClient and go on from a saved checkpoint"
            raise Gone(f"session {session_id} {ended.ended}; {remedy}")
        session.last_seen = monotonic()
        return session

    def sessions(self) -> list[Session]:
        """Those that have not ended."""
        return list(self._sessions.values())

    def find_session(self, session_id: str) -> Session | None:
        """The session if it is there or remembered. To look is no sign of life."""
        return self._sessions.get(session_id) or self._ended_sessions.get(session_id)

    def every_session(self) -> list[Session]:
        """Those that are there or remembered."""
        return [*self._ended_sessions.values(), *self._sessions.values()]

    def end_session(self, session: Session, why: str) -> list[Sampler]:
        """End a session; returns its samplers, which are forgotten. Models are dropped one by one.

        The session itself is remembered, so that a late heartbeat is told to stop.
        """
        session.ended = why
        del self._sessions[session.id]
        _remember(self._ended_sessions, session.id, session)
        ended = [self._samplers.pop(sampler_id, None) for sampler_id in session.samplers]
        return [sampler for sampler in ended if sampler is not None]

    def add_model(self, model: Model) -> None:
        """Make a model known, under its session."""
        self._models[model.id] = model
        self._sessions[model.session_id].models.append(model.id)

    def model(self, model_id: str) -> Model:
        """The model; its session is noted to be alive. Raises Unknown."""
        model = self._models.get(model_id)
        if model is None:
            ended = self._ended_models.get(model_id)
            raise Unknown(f"model {model_id}: {ended.ended}" if ended else _lost("model", model_id))
        self._sessions[model.session_id].last_seen = monotonic()
        model.last_request = _now()
        return model

    def models_of(self, session: Session) -> list[Model]:
        """The session's models that are there."""
        return [self._models[model_id] for model_id in session.models if model_id in self._models]

    def find_model(self, model_id: str) -> Model | None:
        """The model if it is there or remembered. To look is no sign of life."""
        return self._models.get(model_id) or self._ended_models.get(model_id)

    def every_model(self) -> list[Model]:
        """Those that are there or remembered."""
        return [*self._ended_models.values(), *self._models.values()]

    def drop_model(self, model_id: str, why: str) -> None:
        """Let go of a model; `why` is what later requests for it are told."""
        model = self._models.pop(model_id, None)
        if model is not None:
            model.ended = why
            model.failed_passes.clear()
            _remember(self._ended_models, model_id, model)

    def add_sampler(self, sampler: Sampler) -> None:
        """Make a sampling session known, under its session; not if that has ended meanwhile."""
        session = self._sessions.get(sampler.session_id)
        if session is None:
            return
        if sampler.id not in self._samplers:
            session.samplers.append(sampler.id)
        self._samplers[sampler.id] = sampler

    def sampler(self, sampler_id: str) -> Sampler:
        """The sampling session; its session is noted to be alive. Raises Unknown."""
        sampler = self._samplers.get(sampler_id)
        if sampler is None:
            raise Unknown(_lost("sampler", sampler_id))
        self._sessions[sampler.session_id].last_seen = monotonic()
        return sampler

    # -- requests --

    def ticket(self, key: Key | None) -> tuple[Ticket, bool]:
        """The ticket under this key, and whether it is new. None as key is always new.

        The session that the request belongs to is alive at least until the answer is there.
        """
        known = self._by_key.get(key) if key is not None else None
        if known is not None:
            return known, False
        self._count += 1
        ticket = Ticket(f"{self._instance}-{self._count}", key, monotonic())
        ticket.session = self._session_of(key[1]) if key is not None else None
        if ticket.session is not None:
            ticket.session.unanswered += 1
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
        if ticket.session is not None:
            ticket.session.unanswered -= 1
            ticket.session.last_seen = monotonic()
        self._shelve(self._waiting, ticket)

    async def answer(self, request_id: str, timeout_seconds: float) -> Answer | None:
        """The answer, as soon as it is there; None after the timeout or when the engine stops.

        An answer can be fetched again for a while. Raises Unknown, or Gone once it was let go.
        """
        ticket = self._tickets.get(request_id)
        if ticket is None:
            raise self._no_ticket(request_id)
        if ticket.session is not None:
            ticket.session.last_seen = monotonic()
        if ticket.answer is None and not self._closed:
            try:
                async with asyncio.timeout(timeout_seconds):
                    await ticket.settled.wait()
            except TimeoutError:
                return None
        if ticket.answer is not None and ticket.fetched is None:
            ticket.fetched = monotonic()
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

    def _session_of(self, owner: Hashable) -> Session | None:
        """The session of this id, or that which owns the model or sampler of this id."""
        owned = self._models.get(str(owner)) or self._samplers.get(str(owner))
        return self._sessions.get(owned.session_id if owned is not None else str(owner))

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


def _remember(shelf: OrderedDict[str, T], name: str, ended: T) -> None:
    shelf[name] = ended
    if len(shelf) > MOST_ENDED:
        shelf.popitem(last=False)


def _lost(what: str, name: str) -> str:
    return (
        f"{what} {name[:300]} is not known to this engine; it may have been restarted since: "
        "open a new client and go on from a saved checkpoint"
    )
