"""Saving and loading: files written in a model's turn, published beside later turns, fetched back.

See `core` for what methods promise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from backends.engine import wire
from backends.engine.abstract import ModelNotFound
from backends.engine.checkpoints import CheckpointUri, Manifest, checked_name
from backends.engine.core import Core, always, check_sound, json_answer
from backends.engine.ledger import Answer, Model, Ticket
from backends.engine.models import Models
from backends.engine.records import LoraConfig
from backends.engine.scheduler import Job
from backends.errors import Problem, UserError


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
    """Checkpoints of models."""

    def __init__(self, core: Core, models: Models) -> None:
        self._core = core
        self._models = models
        self._publishing: dict[str, asyncio.Future[Any]] = {}

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

    async def manifests(self, model_id: str | None = None) -> list[Manifest]:
        """Every checkpoint, or every one of a model, oldest first."""
        return await self._core.in_io(partial(self._core.store.manifests, model_id))

    async def delete(self, uri: CheckpointUri) -> None:
        """Remove a checkpoint. Raises UserError if there is none."""
        await self.manifest(uri)
        await self._core.in_io(partial(self._core.store.delete, uri))


def about(body: wire.SaveWeights | wire.SaveWeightsForSampler) -> dict[str, Any]:
    """What a request says of its checkpoint, for the manifest."""
    return {"ttl_seconds": body.ttl_seconds, "user_metadata": body.user_metadata or {}}


def _loaded(model: Model, body: wire.LoadWeights) -> Callable[[object], Answer]:
    return always(json_answer(path=body.path, model_id=model.id, type="load_weights"))
