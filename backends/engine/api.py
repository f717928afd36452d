"""The Tinker protocol over HTTP: who may ask, what the body says, how the answer is sent.

Everything else is for the services of `service.Engine`. How mistakes are told, and why:

- a user's mistake in an operation: 200 with a ticket, whose answer is the error (a 4xx would use
  up the operation's number and leave the model waiting for it);
- a mistake where there is no ticket: 400; an id that is not known here: 404; ended: 410;
- no or another key: 401; the model is still loading, or the engine stops: 503, which clients retry.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import tarfile
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from fastapi import FastAPI, Request
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from backends.engine import wire
from backends.engine.checkpoints import CheckpointUri, Manifest
from backends.engine.ledger import Gone, Ticket, Unknown
from backends.engine.service import Engine
from backends.errors import TransientError, UserError

log = logging.getLogger("flowtune.engine")

B = TypeVar("B", bound=wire.Body)
Handler = Callable[[Request], Awaitable[Response]]

ROOT: Final = "/api/v1"
HOLD_SECONDS: Final = 25.0
"""How long a request for an answer is held; the SDK gives up after 45."""

LARGE_BYTES: Final = 2**20
"""Bodies from this size on are read beside the event loop."""

CLIENT_CONFIG: Final[Mapping[str, Any]] = {
    "use_pyqwest_transport": True,
    "proto_compress_fwdbwd": False,
    "fwdbwd_max_chunk_len": 1024,
    "fwdbwd_max_chunk_bytes_count": 25_000_000,
}
"""The SDK's flags. Chunks are larger than its own, and plain: the wire is short."""


def create_app(engine: Engine, api_key: str) -> ASGIApp:
    """The application: routes, and before them the check of the key."""
    app = FastAPI(title="flowtune engine", docs_url=None, redoc_url=None)
    for status, error in ((404, Unknown), (410, Gone), (400, UserError), (400, wire.BadBody)):
        app.add_exception_handler(error, partial(_refusal, status))
    app.add_exception_handler(TransientError, partial(_refusal, 503))
    app.add_exception_handler(Exception, _failure)
    routes = _Routes(engine)
    routes.add_to(app)
    return _Guard(app, engine, api_key)


class _Guard:
    """Lets requests with the key through, once the engine is ready; `healthz` needs no key."""

    def __init__(self, app: ASGIApp, engine: Engine, api_key: str) -> None:
        self._app = app
        self._engine = engine
        self._key = _digest(api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        answer = self._check(scope)
        await (answer or self._app)(scope, receive, send)

    def _check(self, scope: Scope) -> Response | None:
        if scope["path"] != f"{ROOT}/healthz":
            given = next((v for k, v in scope["headers"] if k == b"x-api-key"), None)
            if given is None:
                return _json_response({"detail": "no API key: send it as X-API-Key"}, 401)
            if not hmac.compare_digest(_digest(given), self._key):
                detail = "this API key is not the one that the engine was started with"
                return _json_response({"detail": detail}, 401)
        if self._engine.capabilities is None:
            detail = f"{self._engine.base_model} is loading"
            return _json_response({"status": "loading", "detail": detail}, 503)
        return None


def _digest(key: bytes) -> bytes:
    """Of one length, so that comparing tells nothing about the key."""
    return hashlib.sha256(key).digest()


class _Routes:
    """The endpoints. A handler reads the body, calls the engine, and writes the answer."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def add_to(self, app: FastAPI) -> None:
        """Register every endpoint."""
        engine = self._engine
        numbered: tuple[tuple[str, type[Any], Callable[[Any], Ticket]], ...] = (
            ("optim_step", wire.OptimStep, engine.training.optim_step),
            ("save_weights", wire.SaveWeights, engine.storing.save_weights),
            (
                "save_weights_for_sampler",
                wire.SaveWeightsForSampler,
                engine.samplers.save_weights,
            ),
            ("save_weights_external", wire.Numbered, self.save_weights_external),
            ("load_weights", wire.LoadWeights, engine.storing.load_weights),
            ("create_model", wire.CreateModel, engine.models.create_model),
            ("unload_model", wire.OfModel, engine.models.unload_model),
        )
        # Routes are tried in this order: those of every step and sample come first.
        _post(app, "retrieve_future", self.retrieve_future, wire.RetrieveFuture)
        _post(app, "forward_backward", self.forward_backward)
        _post(app, "asample", self.asample, wire.Sample)
        for name, kind, submit in numbered:
            _post(app, name, self._operation(kind, submit), kind)
        _post(app, "create_session", self.create_session, wire.CreateSession)
        _post(app, "session_heartbeat", self.session_heartbeat, wire.OfSession)
        _post(app, "sessions/{session_id}/finish", self.finish_session)
        _post(
            app, "create_sampling_session", self.create_sampling_session, wire.CreateSamplingSession
        )
        _post(app, "get_info", self.get_info, wire.OfModel)
        _post(app, "weights_info", self.weights_info, wire.TinkerPath)
        _post(app, "client/config", _constant(CLIENT_CONFIG))
        _post(app, "client/dynamic_config", _constant({}))
        _post(app, "telemetry", _constant({"status": "accepted"}))
        _get(app, "healthz", _constant({"status": "ok"}))
        _get(app, "get_server_capabilities", self.get_server_capabilities)
        _get(app, "samplers/{sampler_id}", self.get_sampler)
        _get(app, "checkpoints", self.list_checkpoints)
        _get(app, "training_runs/{model_id}/checkpoints", self.list_checkpoints)
        one = "training_runs/{model_id}/checkpoints/{kind}/{name}"
        _get(app, f"{one}/archive", self.get_archive)
        app.add_api_route(f"{ROOT}/{one}", self.delete_checkpoint, methods=["DELETE"])

    # -- operations --

    def _operation(self, kind: type[B], submit: Callable[[B], Ticket]) -> Handler:
        async def handler(request: Request) -> Response:
            try:
                body = wire.read_json(kind, await _body(request))
            except wire.BadBody as error:
                return _ticket_response(self._engine.refuse_unread(error))
            return _ticket_response(submit(body))

        return handler

    async def forward_backward(self, request: Request) -> Response:
        """A forward, or forward and backward, pass over protobuf."""
        try:
            raw, encoding = await _body(request), request.headers.get("content-encoding", "")
            if len(raw) < LARGE_BYTES:
                body = wire.read_pass(raw, encoding)
            else:
                body = await run_in_threadpool(wire.read_pass, raw, encoding)
        except wire.BadBody as error:
            return _ticket_response(self._engine.refuse_unread(error))
        return _ticket_response(self._engine.training.forward_backward(body))

    def save_weights_external(self, body: wire.Numbered) -> Ticket:
        """Refused: checkpoints are in PEFT's format already."""
        problem = "save_weights_external: this engine's checkpoints are PEFT folders already; "
        problem += "use save_weights_for_sampler"
        return self._engine.refuse_unread(wire.BadBody(problem, body.model_id, body.seq_id))

    async def asample(self, request: Request) -> Response:
        """Samples; the ids of the sequences are given out at once."""
        try:
            body = wire.read_json(wire.Sample, await _body(request))
        except wire.BadBody as error:
            return _ticket_response(self._engine.refuse_unread(error), sample_sequence_ids=[])
        ticket, ids = self._engine.samplers.sample(body)
        return _ticket_response(ticket, sample_sequence_ids=ids)

    async def retrieve_future(self, request: Request) -> Response:
        """A request's answer: as soon as it is there, or 408 to ask again."""
        body = wire.read_json(wire.RetrieveFuture, await _body(request))
        answer = await self._engine.ledger.answer(body.request_id, HOLD_SECONDS)
        if answer is not None:
            return Response(answer.body, media_type=answer.media_type)
        waiting = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
        return _json_response(waiting, 503 if self._engine.ledger.closed else 408)

    # -- sessions, models, samplers --

    async def create_session(self, request: Request) -> Response:
        """A new session."""
        session_id = self._engine.models.create_session(await _read(wire.CreateSession, request))
        return _json_response({"type": "create_session", "session_id": session_id})

    async def session_heartbeat(self, request: Request) -> Response:
        """The client is alive; 410 tells it that its session has ended."""
        self._engine.ledger.session((await _read(wire.OfSession, request)).session_id)
        return _json_response({"type": "session_heartbeat"})

    async def finish_session(self, request: Request) -> Response:
        """The client is done."""
        self._engine.models.finish_session(request.path_params["session_id"])
        return Response(status_code=204)

    async def get_info(self, request: Request) -> Response:
        """What a training client has to know of its model."""
        return _json_response(self._engine.models.get_info(await _read(wire.OfModel, request)))

    async def create_sampling_session(self, request: Request) -> Response:
        """Sampling from a checkpoint or the base model."""
        body = await _read(wire.CreateSamplingSession, request)
        sampler_id = await self._engine.samplers.create_session(body)
        return _json_response(
            {"type": "create_sampling_session", "sampling_session_id": sampler_id}
        )

    async def get_sampler(self, request: Request) -> Response:
        """What a sampling client draws from."""
        sampler = self._engine.ledger.sampler(request.path_params["sampler_id"])
        return _json_response(
            {
                "sampler_id": sampler.id,
                "base_model": self._engine.base_model,
                "model_path": sampler.model_path,
            }
        )

    async def get_server_capabilities(self, request: Request) -> Response:
        """The one model that is served."""
        limits = self._engine.capabilities
        assert limits is not None
        model = {
            "model_name": self._engine.base_model,
            "max_context_length": limits.max_context_length,
            "trainable": True,
            "sampleable": True,
        }
        return _json_response({"supported_models": [model]})

    # -- checkpoints --

    async def weights_info(self, request: Request) -> Response:
        """What a checkpoint was trained as."""
        uri = CheckpointUri.parse((await _read(wire.TinkerPath, request)).tinker_path)
        manifest = await self._engine.storing.manifest(uri)
        info = manifest.model_dump(
            include={"base_model", "lora_rank", "train_attn", "train_mlp", "train_unembed"}
        )
        info["base_model"] = info["base_model"] or self._engine.base_model
        return _json_response(info | {"is_lora": True})

    async def list_checkpoints(self, request: Request) -> Response:
        """The checkpoints of one model, or of all."""
        manifests = await self._engine.storing.manifests(request.path_params.get("model_id"))
        offset, limit = (_count(request, name) for name in ("offset", "limit"))
        chosen = manifests[offset or 0 :][:limit]
        cursor = {"offset": offset or 0, "limit": len(chosen), "total_count": len(manifests)}
        listed = [_checkpoint(manifest) for manifest in chosen]
        return _json_response({"checkpoints": listed, "cursor": cursor})

    async def delete_checkpoint(self, request: Request) -> Response:
        """Remove a checkpoint."""
        await self._engine.storing.delete(_uri(request))
        return Response(status_code=204)

    async def get_archive(self, request: Request) -> Response:
        """A checkpoint's files as a tar archive."""
        folder, manifest = await self._engine.storing.fetch(_uri(request))
        archive = await run_in_threadpool(_pack, folder, manifest)
        return FileResponse(
            archive,
            media_type="application/x-tar",
            filename=f"{manifest.name}.tar",
            background=BackgroundTask(archive.unlink),
        )


# -- helpers -----------------------------------------------------------------------------------


def _post(app: FastAPI, path: str, handler: Handler, kind: type[wire.Body] | None = None) -> None:
    extra = None
    if kind is not None:
        schema = {"schema": kind.model_json_schema()}
        extra = {"requestBody": {"content": {"application/json": schema}}}
    app.add_api_route(f"{ROOT}/{path}", handler, methods=["POST"], openapi_extra=extra)


def _get(app: FastAPI, path: str, handler: Handler) -> None:
    app.add_api_route(f"{ROOT}/{path}", handler, methods=["GET"])


def _constant(answer: Mapping[str, Any]) -> Handler:
    body = json.dumps(answer).encode()

    async def handler(request: Request) -> Response:
        return Response(body, media_type="application/json")

    return handler


async def _body(request: Request) -> bytes:
    """The body. Raises BadBody for one that is too large, which is not read to its end."""
    parts = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > wire.MAX_BODY_BYTES:
            raise wire.BadBody(f"body: has over {wire.MAX_BODY_BYTES} bytes; send smaller batches")
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def _read(kind: type[B], request: Request) -> B:
    return wire.read_json(kind, await _body(request))


def _json_response(content: Any, status: int = 200) -> Response:
    return Response(json.dumps(content).encode(), status, media_type="application/json")


def _ticket_response(ticket: Ticket, **more: Any) -> Response:
    return _json_response({"request_id": ticket.request_id, **more})


async def _refusal(status: int, request: Request, error: Exception) -> Response:
    return _json_response({"detail": str(error)}, status)


async def _failure(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _json_response({"detail": f"{type(error).__name__}: {error}"}, 500)


def _uri(request: Request) -> CheckpointUri:
    return CheckpointUri.parse("tinker://{model_id}/{kind}/{name}".format(**request.path_params))


def _count(request: Request, name: str) -> int | None:
    given = request.query_params.get(name)
    if given is None:
        return None
    if not given.isdecimal() or len(given) > 9:
        raise wire.BadBody(f"{name}: is {given[:80]!r}; give a count")
    return int(given)


def _checkpoint(manifest: Manifest) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{manifest.kind}/{manifest.name}",
        "checkpoint_type": "training" if manifest.kind == "weights" else "sampler",
        "time": manifest.created.isoformat(),
        "tinker_path": str(manifest.uri),
        "size_bytes": manifest.size,
        "expires_at": manifest.expires.isoformat() if manifest.expires else None,
        "user_metadata": manifest.user_metadata,
    }


def _pack(folder: Path, manifest: Manifest) -> Path:
    """A tar archive of a checkpoint's files, in a temporary file."""
    with tempfile.NamedTemporaryFile(prefix="flowtune-", suffix=".tar", delete=False) as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            for name in manifest.files:
                archive.add(folder / name, arcname=name)
        return Path(file.name)
