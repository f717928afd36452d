"""Saving and loading: files written in a model's turn, published beside later turns, fetched back.

See `core` for what methods promise.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

from backends.engine import wire
from backends.engine.abstract import ModelNotFound
from backends.engine.checkpoints import CheckpointUri, Manifest, checked_name
from backends.engine.core import Core, always, check_sound, json_answer
from backends.engine.ledger import Answer, Model, Ticket, Unknown
from backends.engine.models import Models, new_model_id
from backends.engine.records import LoraConfig
from backends.engine.scheduler import Job
from backends.errors import Problem, UserError

log = logging.getLogger("flowtune.engine")

COPIES: Final = uuid.UUID("6e1f3a52-3c1b-4a57-9d0a-5f1d8c0e7b21")
"""Where the ids of copies come from, so that a copy that is asked for again is the same one."""
SWEEP_AGAIN_SECONDS: Final = 60.0
"""When to try again after the store could not be reached."""


@dataclass(slots=True, eq=False)
class Save:
    """A checkpoint on its way: `write` puts its files in `folder`, `about` is for the manifest."""

    uri: CheckpointUri
    write: Callable[[Path], None]
    about: dict[str, Any]
    overwrite: bool = False
    folder: Path | None = None


@dataclass(slots=True, eq=False)
class _Load:
    """A checkpoint on its way back; folder and manifest are set once it is here."""

    uri: CheckpointUri
    optimizer: bool
    folder: Path | None = None
    manifest: Manifest | None = None

    def lora(self, before: LoraConfig) -> LoraConfig:
        """The adapter's config as far as the manifest tells it."""
        assert self.manifest is not None
        told = self.manifest
        return LoraConfig(
            rank=before.rank if told.lora_rank is None else told.lora_rank,
            train_attn=before.train_attn if told.train_attn is None else told.train_attn,
            train_mlp=before.train_mlp if told.train_mlp is None else told.train_mlp,
            train_unembed=before.train_unembed
            if told.train_unembed is None
            else told.train_unembed,
        )


class Storing:
    """Checkpoints of models: saved, loaded, copied, removed when their time is over."""

    def __init__(self, core: Core, models: Models) -> None:
        self._core = core
        self._models = models
        self._publishing: dict[str, asyncio.Future[Any]] = {}
        self._alarm = core.alarm(self.sweep)

    # -- saving --

    def save_weights(self, body: wire.SaveWeights) -> Ticket:
        """Keep weights and optimizer under a name. Raises Unknown."""
        core = self._core
        model = core.ledger.model(body.model_id)
        ticket, new = core.numbered(model, body.seq_id)
        if not new:
            return ticket
        name = body.path if body.path is not None else ticket.request_id
        try:
            uri = CheckpointUri(model.id, "weights", checked_name(name))
        except UserError as error:
            return core.refuse(ticket, str(error), model, body.seq_id)

        def write(folder: Path) -> None:
            core.backend.save_checkpoint(folder, model.id)

        save = Save(uri, write, about(body), overwrite=body.overwrite)
        return self.save(model, ticket, body.seq_id, save, "save_weights")

    def save_weights_external(self, body: wire.SaveWeightsExternal) -> Ticket:
        """Keep the adapter alone under a name, to be downloaded. Raises Unknown."""
        core = self._core
        model = core.ledger.model(body.model_id)
        ticket, new = core.numbered(model, body.seq_id)
        if not new:
            return ticket
        if body.age_encryption_recipients:
            problem = "age_encryption_recipients: this engine does not encrypt; leave them out"
            return core.refuse(ticket, problem, model, body.seq_id)
        try:
            uri = CheckpointUri(model.id, "external_weights", checked_name(body.path))
        except UserError as error:
            return core.refuse(ticket, str(error), model, body.seq_id)

        def write(folder: Path) -> None:
            sampler_id = f"{uri}@export"
            core.backend.save_sampler_checkpoint(folder, model.id, sampler_id)
            core.backend.delete_sampler(sampler_id)

        save = Save(uri, write, {"ttl_seconds": body.ttl_seconds})
        return self.save(model, ticket, body.seq_id, save, "save_weights_external")

    def save(
        self, model: Model, ticket: Ticket, seq_id: int | None, save: Save, kind: str
    ) -> Ticket:
        """Queue a checkpoint: its files are written in turn, its manifest beside later turns."""
        answer = json_answer(path=str(save.uri), type=kind)

        async def prepare() -> None:
            await self.published(save.uri)
            begin = partial(self._core.store.begin, save.uri, overwrite=save.overwrite)
            save.folder = await self._core.in_io(begin)

        def run() -> None:
            check_sound(model)
            assert save.folder is not None
            save.write(save.folder)
            lora = model.lora
            save.about |= {
                "base_model": self._core.base_model,
                "lora_rank": lora.rank,
                "train_attn": lora.train_attn,
                "train_mlp": lora.train_mlp,
                "train_unembed": lora.train_unembed,
            }

        def done(result: Any) -> None:
            if isinstance(result, BaseException):
                self._core.settle(ticket, result, always(answer))
            else:
                self._publish(ticket, save, answer)

        return self._core.queue(model, ticket, seq_id, Job(run, done, prepare))

    def _publish(self, ticket: Ticket, save: Save, answer: Answer) -> None:
        """Make written files a checkpoint, off this thread; then the ticket has its answer."""
        assert save.folder is not None
        publish = partial(self._core.store.publish, save.uri, save.folder, **save.about)
        work = self._publishing[str(save.uri)] = self._core.in_io(publish)

        def published(work: asyncio.Future[Manifest]) -> None:
            del self._publishing[str(save.uri)]
            if work.exception() is None:
                self._watch(work.result().expires)
            self._core.settle(ticket, work.exception() or work.result(), always(answer))

        work.add_done_callback(published)

    async def published(self, uri: CheckpointUri) -> None:
        """Wait for a save of this checkpoint that is under way."""
        work = self._publishing.get(str(uri))
        if work is not None:
            await asyncio.wait([work])

    # -- loading --

    def load_weights(self, body: wire.LoadWeights) -> Ticket:
        """A checkpoint into a model that is there, or into a new one. Raises Unknown or Gone."""
        core = self._core
        if body.model_id is not None:
            return self._load_in_place(body, core.ledger.model(body.model_id))
        if body.session_id is None or body.model_seq_id is None:
            problem = "load_weights: give model_id, or session_id and model_seq_id"
            return core.refuse(core.ledger.ticket(None)[0], problem)
        session = core.ledger.session(body.session_id)
        ticket, new = core.ledger.ticket(("model", session.id, body.model_seq_id))
        if not new:
            return ticket
        base_model = body.base_model or core.base_model
        mistake = core.check_base_model(base_model, body.optimizer_config)
        mistake = mistake or self._models.check_new(session, body.model_seq_id)
        if mistake:
            return core.refuse(ticket, mistake)
        try:
            load = _Load(CheckpointUri.parse(body.path), body.optimizer)
        except UserError as error:
            return core.refuse(ticket, str(error))
        unknown = LoraConfig(rank=0)
        model = self._models.add(session, body.model_seq_id, unknown, body.user_metadata)
        run, prepare = partial(self._load, model, load), partial(self._fetch, load)
        return self._models.begin(model, ticket, run, _loaded(model, body), prepare)

    def _load_in_place(self, body: wire.LoadWeights, model: Model) -> Ticket:
        ticket, new = self._core.numbered(model, body.seq_id)
        if not new:
            return ticket
        try:
            load = _Load(CheckpointUri.parse(body.path), body.optimizer)
        except UserError as error:
            return self._core.refuse(ticket, str(error), model, body.seq_id)
        run, prepare = partial(self._load, model, load), partial(self._fetch, load)
        return self._core.change(model, ticket, body.seq_id, run, _loaded(model, body), prepare)

    async def _fetch(self, load: _Load) -> None:
        """Have the checkpoint's files here, after any save of them that is still under way."""
        load.folder, load.manifest = await self.fetch(load.uri)

    def _load(self, model: Model, load: _Load) -> None:
        """On the compute thread."""
        assert load.folder is not None
        try:
            self._core.backend.load_checkpoint(load.folder, model.id, optimizer=load.optimizer)
        except ModelNotFound as error:
            raise UserError(Problem("path", f"{load.uri}: {error.args[0]}")) from error
        model.version = self._core.backend.version(model.id)
        model.lora = load.lora(model.lora)
        model.failed_passes.clear()

    # -- what there is --

    async def fetch(self, uri: CheckpointUri) -> tuple[Path, Manifest]:
        """A checkpoint's files in a local folder. Raises UserError if there is none."""
        await self.published(uri)
        return await self._core.in_io(partial(self._core.store.fetch, uri))

    async def manifest(self, uri: CheckpointUri) -> Manifest:
        """A checkpoint's manifest. Raises UserError if there is none."""
        await self.published(uri)
        return await self._core.in_io(partial(self._core.store.manifest, uri))

    async def existing(self, uri: CheckpointUri) -> Manifest:
        """A checkpoint's manifest. Raises Unknown if there is none."""
        await self.published(uri)
        return _known(uri, await self._core.in_io(partial(self._core.store.find, uri)))

    async def manifests(self, model_id: str | None = None) -> list[Manifest]:
        """Every checkpoint, or every one of a model, oldest first."""
        return await self._core.in_io(partial(self._core.store.manifests, model_id))

    # -- changing what there is --

    async def delete(self, uri: CheckpointUri) -> None:
        """Remove a checkpoint. Raises Unknown if there is none."""
        await self.existing(uri)
        await self._core.in_io(partial(self._core.store.delete, uri))

    async def set_public(self, uri: CheckpointUri, public: bool) -> None:
        """Mark a checkpoint as public or not. Raises Unknown if there is none."""
        await self._set_flags(uri, public=public)

    async def set_ttl(self, uri: CheckpointUri, ttl_seconds: int | None) -> None:
        """Have a checkpoint expire so long from now, or never. Raises Unknown if there is none."""
        expires = None
        if ttl_seconds is not None:
            expires = datetime.now(UTC) + timedelta(seconds=ttl_seconds)
        await self._set_flags(uri, expires=expires)
        self._watch(expires)

    async def _set_flags(self, uri: CheckpointUri, **changes: Any) -> None:
        await self.published(uri)
        change = partial(self._core.store.set_flags, uri, **changes)
        _known(uri, await self._core.in_io(change))

    async def copy(self, body: wire.CopyWeights, request: str) -> CheckpointUri:
        """Copy a checkpoint to a new model id, which cannot be trained; the same one for the same
        `request`. Raises UserError, Unknown or Gone.
        """
        source = CheckpointUri.parse(body.source_path)
        target = CheckpointUri(self._new_home(body, request), source.kind, source.name)
        await self.published(source)
        await self.published(target)
        copy = partial(self._core.store.copy, source, target, body.ttl_seconds)
        work = self._publishing[str(target)] = self._core.in_io(copy)
        work.add_done_callback(lambda _: self._publishing.pop(str(target), None))
        await work
        if body.ttl_seconds is not None:
            self._watch(datetime.now(UTC) + timedelta(seconds=body.ttl_seconds))
        return target

    def _new_home(self, body: wire.CopyWeights, request: str) -> str:
        if body.session_id is not None:
            if body.model_seq_id is None:
                raise UserError(Problem("model_seq_id", "is missing", "give it with session_id"))
            session = self._core.ledger.session(body.session_id)
            problem = self._models.check_new(session, body.model_seq_id)
            if problem:
                raise UserError(Problem("copy_weights", problem))
            return new_model_id(session, body.model_seq_id)
        if body.destination_project_id is None:
            remedy = "give any name (this engine has one project), or session_id and model_seq_id"
            raise UserError(Problem("destination_project_id", "is missing", remedy))
        return f"copy-{uuid.uuid5(COPIES, f'{request} {body.source_path}')}"

    # -- the end of their time --

    def sweep(self) -> None:
        """Begin to remove what has expired, beside the event loop; then wait for what comes."""
        work = self._core.in_io(self._core.store.sweep)

        def swept(work: asyncio.Future[datetime | None]) -> None:
            if work.cancelled():
                return
            error = work.exception()
            if error is None:
                self._watch(work.result())
            else:
                log.error("expired checkpoints could not be removed", exc_info=error)
                self._alarm.set(SWEEP_AGAIN_SECONDS)

        work.add_done_callback(swept)

    def _watch(self, expires: datetime | None) -> None:
        """Sweep when this moment has come."""
        if expires is not None:
            self._alarm.set((expires - datetime.now(UTC)).total_seconds())


def _known(uri: CheckpointUri, manifest: Manifest | None) -> Manifest:
    if manifest is None:
        raise Unknown(f"there is no checkpoint {uri}; it may have expired or been deleted")
    return manifest


def about(body: wire.SaveWeights | wire.SaveWeightsForSampler) -> dict[str, Any]:
    """What a request says of its checkpoint, for the manifest."""
    return {"ttl_seconds": body.ttl_seconds, "user_metadata": body.user_metadata or {}}


def _loaded(model: Model, body: wire.LoadWeights) -> Callable[[object], Answer]:
    return always(json_answer(path=body.path, model_id=model.id, type="load_weights"))
