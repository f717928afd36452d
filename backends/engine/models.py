"""Sessions and models: made, described, unloaded, ended. See `core` for what methods promise."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from backends.engine import wire
from backends.engine.core import Core, always, json_answer, logged
from backends.engine.ledger import Answer, Model, Session, Ticket
from backends.engine.records import LoraConfig
from backends.engine.scheduler import Job
from backends.errors import Problem, UserError

log = logging.getLogger("flowtune.engine")

T = TypeVar("T")


class Models:
    """Who there is. `let_go` frees a sampler's weights, on the compute thread.

    A session whose client shows no sign of life for `session_seconds` is ended. The SDK's
    heartbeats come every 10 seconds.
    """

    def __init__(
        self, core: Core, let_go: Callable[[str], None], *, session_seconds: float
    ) -> None:
        self._core = core
        self._let_go = let_go
        self._session_seconds = session_seconds
        self._alarm = core.alarm(self._end_lapsed)

    # -- sessions --

    def create_session(self, body: wire.CreateSession) -> str:
        """A new session's id."""
        session = self._core.ledger.open_session(body.user_metadata, body.display_name)
        self._alarm.set(self._session_seconds)
        return session.id

    def finish_session(self, session_id: str, body: wire.FinishSession) -> None:
        """End a session at its client's wish; again, if the answer was lost. Raises Unknown."""
        found = self._core.ledger.find_session(session_id)
        if found is not None and found.ended is not None:
            return
        session = self._core.ledger.session(session_id)
        session.reason, session.detail = body.reason.type, body.detail
        self._end(session, "has ended")

    def _end_lapsed(self) -> None:
        """End the sessions whose time is over, and wake up when the next one's could be.

        Time does not run while a request has no answer: there is a computation to wait for, or its
        result to fetch.
        """
        limit, now = self._session_seconds, monotonic()
        for session in self._core.ledger.sessions():
            left = limit if session.unanswered else session.last_seen + limit - now
            if left > 0:
                self._alarm.set(left)
                continue
            log.info("session %s expired, with %d models made", session.id, len(session.models))
            self._end(session, f"expired after {limit:g} s without a sign of life")

    def _end(self, session: Session, how: str) -> None:
        """Free what belongs to a session."""
        ledger, scheduler = self._core.ledger, self._core.scheduler
        for model in ledger.models_of(session):
            self._drop(model.id, f"its session {how}; go on from a saved checkpoint")
            scheduler.run_soon(Job(partial(self._delete, model.id), logged))
        for sampler in ledger.end_session(session, how):
            if sampler.model_path is None and sampler.weights_id is not None:
                scheduler.run_soon(Job(partial(self._let_go, sampler.weights_id), logged))
        scheduler.run_soon(Job(return_memory, logged))

    # -- models --

    def create_model(self, body: wire.CreateModel) -> Ticket:
        """A fresh adapter. Raises Unknown or Gone for the session."""
        core = self._core
        session = core.ledger.session(body.session_id)
        ticket, new = core.ledger.ticket(("model", session.id, body.model_seq_id))
        if not new:
            return ticket
        lora, most = body.lora_config.record(), core.limits.max_lora_rank
        problem = core.check_base_model(body.base_model, body.optimizer_config)
        if problem is None and not 1 <= lora.rank <= most:
            problem = f"lora_config.rank: is {lora.rank}; take one from 1 to {most}"
        problem = problem or self.check_new(session, body.model_seq_id)
        if problem:
            return core.refuse(ticket, problem)
        model = self.add(session, body.model_seq_id, lora, body.user_metadata)
        run = partial(core.backend.create_model, model.id, lora)
        answer = json_answer(model_id=model.id, type="create_model")
        return self.begin(model, ticket, run, always(answer))

    def check_new(self, session: Session, number: int) -> str | None:
        """Why a model of this number cannot be made, or None."""
        if self._core.ledger.find_model(new_model_id(session, number)) is not None:
            return f"model_seq_id: {number} is taken in this session; take the next number"
        return None

    def add(
        self, session: Session, number: int, lora: LoraConfig, metadata: dict[str, Any] | None
    ) -> Model:
        """Make a model known, under the id that the SDK takes for granted."""
        model = Model(new_model_id(session, number), session.id, lora, metadata or {})
        self._core.ledger.add_model(model)
        self._core.scheduler.open_lane(model.id, 0)
        return model

    def begin(
        self,
        model: Model,
        ticket: Ticket,
        run: Callable[[], T],
        encode: Callable[[T], Answer],
        prepare: Callable[[], Any] | None = None,
    ) -> Ticket:
        """Queue what makes a model, as number 0 of its lane; if it fails there is no model."""

        def done(result: Any) -> None:
            if isinstance(result, Exception):
                self._drop(model.id, f"could not be made: {result}")
            model.made = not isinstance(result, Exception)
            self._core.settle(ticket, result, encode)

        return self._core.queue(model, ticket, 0, Job(run, done, prepare))

    def unload_model(self, body: wire.OfModel) -> Ticket:
        """Free a model once what is queued for it is done. Raises Unknown."""
        model = self._core.ledger.model(body.model_id)
        ticket, new = self._core.ledger.ticket(("unload", model.id))
        if not new:
            return ticket
        answer = json_answer(model_id=model.id, type="unload_model")

        def done(result: Any) -> None:
            self._drop(model.id, "was unloaded; go on from a saved checkpoint")
            self._core.settle(ticket, result, always(answer))

        return self._core.queue(model, ticket, None, Job(partial(self._delete, model.id), done))

    def get_info(self, body: wire.OfModel) -> dict[str, Any]:
        """What the SDK wants to know of a model. Raises Unknown."""
        model = self._core.ledger.model(body.model_id)
        name = self._core.base_model
        # The SDK takes a relative path with two slashes for something else.
        tokenizer = str(Path(name).absolute()) if Path(name).is_dir() else name
        return {
            "type": "get_info",
            "model_id": model.id,
            "model_name": name,
            "model_data": {"model_name": name, "tokenizer_id": tokenizer},
            "is_lora": True,
            "lora_rank": model.lora.rank,
        }

    def _drop(self, model_id: str, why: str) -> None:
        """Forget a model; what waits for it, and who asks for it later, is told why."""
        self._core.ledger.drop_model(model_id, why)
        self._core.scheduler.close_lane(model_id, UserError(Problem(f"model {model_id}", why)))

    def _delete(self, model_id: str) -> None:
        if self._core.backend.has_model(model_id):
            self._core.backend.delete_model(model_id)


def return_memory() -> None:
    """Give what was freed back to the system; glibc would keep most of it for itself.

    After 20 models of rank 256 a third to all of their memory stayed with the process.
    """
    with suppress(OSError, TypeError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def new_model_id(session: Session, number: int) -> str:
    """The id that the SDK takes for granted."""
    return f"{session.id}:train:{number}"
