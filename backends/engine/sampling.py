"""Sampling sessions, the weights they draw from, and batches of samples.

See `core` for what methods promise.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from backends.engine import wire
from backends.engine.checkpoints import CheckpointUri, checked_name
from backends.engine.core import Core, Sampling, always, check_sound, json_answer
from backends.engine.ledger import Answer, Model, Sampler, Ticket
from backends.engine.records import RequestError, SampleOutput, SampleRequest
from backends.engine.scheduler import Job, Stopping
from backends.engine.storing import Save, Storing, about
from backends.errors import Problem, UserError

SNAPSHOTS: Final = 32
"""How many unnamed samplers are kept in memory; beyond, the one unused for longest is let go."""
NAMED: Final = 8
"""How many samplers loaded from checkpoints are; these can be loaded again."""


class HeldSamplers:
    """Which sampler weights the backend holds, least recently used first. Compute thread only."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._named: OrderedDict[str, None] = OrderedDict()
        self._unnamed: OrderedDict[str, None] = OrderedDict()

    def use(self, weights_id: str, *, named: bool) -> None:
        """Note that these weights are held and in use."""
        held = self._named if named else self._unnamed
        held[weights_id] = None
        held.move_to_end(weights_id)

    def let_go(self, weights_id: str) -> None:
        """Free these weights, if they are held."""
        self._named.pop(weights_id, None)
        self._unnamed.pop(weights_id, None)
        if self._core.backend.has_sampler(weights_id):
            self._core.backend.delete_sampler(weights_id)

    def make_room(self) -> None:
        """Free those beyond the limits."""
        for held, most in ((self._named, NAMED), (self._unnamed, SNAPSHOTS)):
            while len(held) > most:
                self.let_go(next(iter(held)))


class Samplers:
    """Who draws from what."""

    def __init__(self, core: Core, storing: Storing, held: HeldSamplers) -> None:
        self._core = core
        self._storing = storing
        self._held = held

    # -- making --

    async def create_session(self, body: wire.CreateSamplingSession) -> str:
        """A sampling session's id. Raises UserError, Unknown or Gone."""
        session = self._core.ledger.session(body.session_id)
        sampler_id = f"{session.id}:sample:{body.sampling_session_seq_id}"
        if sampler_id in session.samplers:
            return sampler_id
        weights_id = None
        if body.model_path is not None:
            uri = CheckpointUri.parse(body.model_path)
            weights_id = _weights_id(uri, (await self._storing.manifest(uri)).created)
        elif body.base_model is None:
            raise UserError(Problem("model_path", "is missing", "give it, or base_model"))
        if body.base_model is not None:
            problem = self._core.check_base_model(body.base_model)
            if problem:
                raise UserError(Problem("create_sampling_session", problem))
        self._core.ledger.add_sampler(Sampler(sampler_id, session.id, weights_id, body.model_path))
        return sampler_id

    def save_weights(self, body: wire.SaveWeightsForSampler) -> Ticket:
        """Keep weights for sampling: under a name, or for one new sampling session only."""
        core = self._core
        model = core.ledger.model(body.model_id)
        ticket, new = core.numbered(model, body.seq_id)
        if not new:
            return ticket
        if body.path is None:
            return self._snapshot(model, ticket, body)
        try:
            uri = CheckpointUri(model.id, "sampler_weights", checked_name(body.path))
        except UserError as error:
            return core.refuse(ticket, str(error), model, body.seq_id)
        created = datetime.now(UTC)
        weights_id = _weights_id(uri, created)

        def write(folder: Path) -> None:
            core.backend.save_sampler_checkpoint(folder, model.id, weights_id)
            self._held.use(weights_id, named=True)
            self._held.make_room()

        save = Save(uri, write, about(body) | {"created": created})
        return self._storing.save(model, ticket, body.seq_id, save, "save_weights_for_sampler")

    def _snapshot(self, model: Model, ticket: Ticket, body: wire.SaveWeightsForSampler) -> Ticket:
        """Freeze the weights for a new sampling session; nothing is written."""
        core = self._core
        if body.sampling_session_seq_id is None:
            problem = "path: is missing; give it, or sampling_session_seq_id"
            return core.refuse(ticket, problem, model, body.seq_id)
        sampler_id = f"{model.session_id}:sample:{body.sampling_session_seq_id}"
        weights_id = f"{model.id}:inflight" if body.kind == "inflight" else sampler_id
        answer = json_answer(sampling_session_id=sampler_id, type="save_weights_for_sampler")

        def run() -> None:
            check_sound(model)
            core.backend.save_sampler_checkpoint(None, model.id, weights_id, persist=False)
            self._held.use(weights_id, named=False)
            self._held.make_room()

        def done(result: Any) -> None:
            if not isinstance(result, BaseException):
                core.ledger.add_sampler(Sampler(sampler_id, model.session_id, weights_id))
            core.settle(ticket, result, always(answer))

        return core.queue(model, ticket, body.seq_id, Job(run, done))

    # -- drawing --

    def sample(self, body: wire.Sample) -> tuple[Ticket, list[str]]:
        """A sample, and an id for each of its sequences. Raises Unknown."""
        core = self._core
        if body.sampling_session_id is None:
            problem = "sampling_session_id: is missing; create a sampling session first"
            return core.refuse(core.ledger.ticket(None)[0], problem), []
        sampler = core.ledger.sampler(body.sampling_session_id)
        number = body.seq_id if body.seq_id is not None else object()  # always a new one
        ticket, new = core.ledger.ticket(("sample", sampler.id, number))
        if new:
            try:
                request = body.record(
                    ticket.request_id, sampler.weights_id, core.limits.max_context_length
                )
            except wire.BadBody as error:
                core.refuse(ticket, str(error))
            else:
                last_n, targets = body.prompt_logprobs_last_n, body.target_prompt_logprobs
                core.scheduler.sample(Sampling(ticket, sampler, request, last_n, targets))
        return ticket, [f"{ticket.request_id}:{index}" for index in range(body.num_samples)]

    def run(self, arriving: Callable[[], Sequence[Sampling]]) -> None:
        """Draw what arrives, until nothing more does. On the compute thread.

        A request that cannot be drawn fails alone. Raises what `arriving` raises.
        """
        unanswered: dict[str, Sampling] = {}

        def more() -> list[SampleRequest]:
            arrived = arriving()
            if arrived:
                self._held.make_room()
            return [item.request for item in arrived if self._begin(item, unanswered)]

        def finished(request_id: str, answer: SampleOutput | RequestError) -> None:
            self._tell(unanswered.pop(request_id), answer)

        failed: Exception | RequestError
        failed = RequestError("the backend gave no answer", category="server")
        try:
            self._core.backend.serve_samples(more, finished)
        except Stopping:
            raise
        except Exception as error:  # noqa: BLE001  (it is these requests' answer)
            failed = error
        for item in unanswered.values():
            self._tell(item, failed)
        self._held.make_room()

    def _begin(self, item: Sampling, unanswered: dict[str, Sampling]) -> bool:
        """Have a request's weights at hand; whether it can be drawn."""
        session = item.ticket.session
        try:
            if session is not None and session.ended is not None:
                raise UserError(
                    Problem(f"session {session.id}", session.ended, "open a new ServiceClient")
                )
            self._have(item.sampler)
        except Exception as error:  # noqa: BLE001  (it is this request's answer)
            self._tell(item, error)
            return False
        unanswered[item.request.request_id] = item
        return True

    def _tell(self, item: Sampling, result: SampleOutput | RequestError | Exception) -> None:
        encode = partial(_answer, item=item)
        with suppress(RuntimeError):  # the loop is closed: the process ends, nobody waits
            self._core.loop.call_soon_threadsafe(self._core.settle, item.ticket, result, encode)

    def _have(self, sampler: Sampler) -> None:
        """Make sure that the backend holds a sampler's weights."""
        if sampler.weights_id is None:
            return
        if not self._core.backend.has_sampler(sampler.weights_id):
            self._load(sampler, sampler.weights_id)
        self._held.use(sampler.weights_id, named=sampler.model_path is not None)

    def _load(self, sampler: Sampler, weights_id: str) -> None:
        if sampler.model_path is None:
            raise UserError(
                Problem(
                    f"sampler {sampler.id}",
                    f"was unnamed and is let go (of these the newest {SNAPSHOTS} are kept)",
                    "save the weights under a name to keep them for longer",
                )
            )
        uri = CheckpointUri.parse(sampler.model_path)
        folder, manifest = self._core.store.fetch(uri)
        if _weights_id(uri, manifest.created) != weights_id:
            raise UserError(Problem("path", f"{uri} was replaced", "make a new sampling client"))
        self._core.backend.load_sampler_checkpoint(folder, weights_id)


def _weights_id(uri: CheckpointUri, created: datetime) -> str:
    """Sampler weights by checkpoint; another checkpoint of the same name gets another id."""
    return f"{uri}@{created.isoformat()}"


def _answer(output: SampleOutput, item: Sampling) -> Answer:
    return Answer(wire.sample_result(output, item.last_n, item.targets), wire.PROTOBUF)
