"""What there is: training runs, checkpoints and sessions, as the SDK's `RestClient` has them told.

Runs and sessions of this process are known to the ledger; runs of earlier processes on the same
store are known by their checkpoints. To look is no sign of life. Documents have the fields of the
types in `tinker/types`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from operator import itemgetter
from typing import Any, Final

from backends.engine import wire
from backends.engine.checkpoints import CheckpointUri, Kind, Manifest
from backends.engine.core import Core
from backends.engine.ledger import Model, Session, Unknown
from backends.engine.storing import Storing
from backends.errors import Problem, UserError

OWNER: Final = "engine"
"""To whom everything belongs: there is one key, and whoever has it is the owner."""
PROJECT: Final = "engine"
"""Where everything is."""

Document = dict[str, Any]
Query = Mapping[str, str]

_TYPES: Final[Mapping[Kind, str]] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


class Rest:
    """Answers as documents, ready for JSON. `query` is what stands behind the `?` of a request."""

    def __init__(self, core: Core, storing: Storing) -> None:
        self._core = core
        self._storing = storing

    def capabilities(self) -> Document:
        """The one model that is served."""
        model = {
            "model_name": self._core.base_model,
            "max_context_length": self._core.limits.max_context_length,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    # -- training runs --

    async def training_run(self, run_id: str, query: Query) -> Document:
        """One training run. Raises Unknown."""
        _check_scope(query)
        model = self._core.ledger.find_model(run_id)
        manifests = await self._storing.manifests(run_id)
        if not manifests and (model is None or not model.made):
            raise Unknown(f"there is no training run {run_id[:300]}; see `tinker run list`")
        return _run(self._core.base_model, run_id, model, manifests)

    async def training_runs(self, query: Query) -> Document:
        """A page of the training runs, those with the newest requests first."""
        page = _page(query, 20)
        _check_scope(query)
        by_run: dict[str, list[Manifest]] = {}
        for manifest in await self._storing.manifests():
            by_run.setdefault(manifest.model_id, []).append(manifest)
        models = {model.id: model for model in self._core.ledger.every_model() if model.made}
        runs = [
            _run(self._core.base_model, run_id, models.get(run_id), by_run.get(run_id, []))
            for run_id in models.keys() | by_run.keys()
        ]
        runs.sort(key=itemgetter("last_request_time", "training_run_id"), reverse=True)
        return {"training_runs": runs[page.slice], "cursor": page.cursor(len(runs))}

    # -- checkpoints --

    async def checkpoints(self, run_id: str) -> Document:
        """The checkpoints of one training run, oldest first."""
        manifests = await self._storing.manifests(run_id)
        return {"checkpoints": [_checkpoint(manifest) for manifest in manifests]}

    async def every_checkpoint(self, query: Query) -> Document:
        """A page of all checkpoints, newest first."""
        page = _page(query, 100)
        manifests = (await self._storing.manifests())[::-1]
        listed = [_checkpoint(manifest) for manifest in manifests[page.slice]]
        return {"checkpoints": listed, "cursor": page.cursor(len(manifests))}

    async def weights_info(self, body: wire.TinkerPath) -> Document:
        """What a checkpoint was trained as. Raises UserError if there is none."""
        manifest = await self._storing.manifest(CheckpointUri.parse(body.tinker_path))
        told = {"base_model", "lora_rank", "train_attn", "train_mlp", "train_unembed"}
        info = manifest.model_dump(include=told) | {"is_lora": True}
        return info | {"base_model": manifest.base_model or self._core.base_model}

    # -- sessions and samplers --

    def sampler(self, sampler_id: str) -> Document:
        """What a sampling client draws from. Raises Unknown."""
        sampler = self._core.ledger.sampler(sampler_id)
        base_model, path = self._core.base_model, sampler.model_path
        return {"sampler_id": sampler.id, "base_model": base_model, "model_path": path}

    def session(self, session_id: str, query: Query) -> Document:
        """One session, which may have ended. Raises Unknown."""
        _check_scope(query)
        session = self._core.ledger.find_session(session_id)
        if session is None:
            raise Unknown(f"there is no session {session_id[:300]} in this engine's memory")
        return {
            "training_run_ids": session.models,
            "sampler_ids": session.samplers,
            "user_metadata": _texts(session.user_metadata),
            "display_name": session.display_name,
        }

    def sessions(self, query: Query) -> Document:
        """A page of the ids of this process's sessions, newest first."""
        page = _page(query, 20)
        _check_scope(query)
        return {"sessions": [session.id for session in self._newest_sessions()[page.slice]]}

    async def search(self, body: wire.SearchSessions) -> Document:
        """A page of the sessions that match, newest first."""
        if body.project_ids is not None:
            raise UserError(Problem("project_ids", "this engine has no projects", "leave it out"))
        found = [session for session in self._newest_sessions() if _matches(session, body)]
        if body.cursor is not None:
            last = (body.cursor.last_created_at, body.cursor.last_session_id)
            found = [session for session in found if (session.created, session.id) < last]
        shown = found[: body.limit]
        manifests = await self._storing.manifests() if shown else []
        following = None
        if len(found) > len(shown):
            created, session_id = shown[-1].created.isoformat(), shown[-1].id
            following = {"last_created_at": created, "last_session_id": session_id}
        return {
            "sessions": [_summary(session, manifests) for session in shown],
            "next_cursor": following,
        }

    def _newest_sessions(self) -> list[Session]:
        every = self._core.ledger.every_session()
        return sorted(every, key=lambda session: (session.created, session.id), reverse=True)


# -- documents ---------------------------------------------------------------------------------


def _run(base_model: str, run_id: str, model: Model | None, manifests: list[Manifest]) -> Document:
    """A training run from what the ledger has of it, what the store has (oldest first), or both."""
    newest = manifests[-1] if manifests else None
    times = [manifest.created for manifest in manifests[-1:]]
    if model is not None:
        times.append(model.last_request)
        rank, metadata = model.lora.rank, model.user_metadata
    else:
        assert newest is not None
        base_model = newest.base_model or base_model
        rank, metadata = newest.lora_rank or 0, {}
    return {
        "training_run_id": run_id,
        "base_model": base_model,
        "model_owner": OWNER,
        "is_lora": True,
        "lora_rank": rank or None,
        "corrupted": model is not None and model.broken is not None,
        "last_request_time": max(times).isoformat(),
        "last_checkpoint": _last(manifests, "weights"),
        "last_sampler_checkpoint": _last(manifests, "sampler_weights"),
        "user_metadata": _texts(metadata),
    }


def _last(manifests: list[Manifest], kind: Kind) -> Document | None:
    of_kind = [manifest for manifest in manifests if manifest.kind == kind]
    return _checkpoint(of_kind[-1]) if of_kind else None


def _checkpoint(manifest: Manifest) -> Document:
    return {
        "checkpoint_id": f"{manifest.kind}/{manifest.name}",
        "checkpoint_type": _TYPES[manifest.kind],
        "time": manifest.created.isoformat(),
        "tinker_path": str(manifest.uri),
        "size_bytes": manifest.size,
        "public": manifest.public,
        "expires_at": _time(manifest.expires),
        "user_metadata": _texts(manifest.user_metadata),
    }


def _summary(session: Session, manifests: Iterable[Manifest]) -> Document:
    sizes = [m.size for m in manifests if m.model_id.partition(":")[0] == session.id]
    return {
        "session_id": session.id,
        "created_at": session.created.isoformat(),
        "owner": OWNER,
        "project_id": PROJECT,
        "status": _status(session),
        "checkpoints_count": len(sizes),
        "checkpoint_storage_bytes": sum(sizes),
        "display_name": session.display_name,
        "user_metadata": _texts(session.user_metadata),
    }


def _status(session: Session) -> Document | None:
    """None for a session that expired: nobody said that it was done, and it no longer runs."""
    if session.reason is not None:
        reason = {"type": session.reason}
        return {"type": "client_finished", "reason": reason, "detail": session.detail}
    return {"type": "active"} if session.ended is None else None


def _matches(session: Session, body: wire.SearchSessions) -> bool:
    if body.owner.type == "user" and OWNER not in body.owner.owner_urns:
        return False
    metadata = _texts(session.user_metadata)
    if any(metadata.get(key) != value for key, value in body.user_metadata.items()):
        return False
    if body.statuses is not None and not any(_is(session, asked) for asked in body.statuses):
        return False
    if body.session_id is None and body.display_name is None:
        return True
    words = (body.display_name or "").lower().split()
    name = (session.display_name or "").lower()
    return session.id == body.session_id or (bool(words) and all(word in name for word in words))


def _is(session: Session, asked: wire.SearchStatus) -> bool:
    status = _status(session)
    if status is None or status["type"] != asked.type:
        return False
    return asked.reasons is None or session.reason in asked.reasons


def _texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The SDK refuses answers with metadata that is not text; a manifest may have any."""
    return {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in metadata.items()
    }


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


# -- queries -----------------------------------------------------------------------------------


class _Page:
    """Which part of a list is asked for."""

    def __init__(self, offset: int, limit: int) -> None:
        self._offset = offset
        self._limit = limit

    @property
    def slice(self) -> slice:
        return slice(self._offset, self._offset + self._limit)

    def cursor(self, total: int) -> Document:
        return {"offset": self._offset, "limit": self._limit, "total_count": total}


def _page(query: Query, limit: int) -> _Page:
    return _Page(_count(query, "offset", 0), _count(query, "limit", limit))


def _count(query: Query, name: str, default: int) -> int:
    given = query.get(name)
    if given is None:
        return default
    if not given.isdecimal() or len(given) > 9:
        raise UserError(Problem(name, f"is {given[:80]!r}", "give a count of 0 or more"))
    return int(given)


def _check_scope(query: Query) -> None:
    """Everything here is the caller's own, so that both scopes mean the same."""
    scope = query.get("access_scope", "owned")
    if scope not in ("owned", "accessible"):
        raise UserError(Problem("access_scope", f"is {scope[:80]!r}", "take owned or accessible"))
    if "project_id" in query:
        raise UserError(Problem("project_id", "this engine has no projects", "leave it out"))
