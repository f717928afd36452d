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
import secrets
import tarfile
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

from fastapi import FastAPI, Request
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from backends.engine import wire
from backends.engine.checkpoints import CheckpointUri, Manifest
from backends.engine.ledger import Gone, Ticket, Unknown
from backends.engine.openapi import COUNT, JSON, SCOPE, Endpoint, describe
from backends.engine.service import Engine
from backends.errors import Problem, TransientError, UserError

log = logging.getLogger("flowtune.engine")

B = TypeVar("B", bound=wire.Body)
Handler = Callable[[Request], Awaitable[Response]]
Table = Iterable[tuple[Endpoint, Handler]]

ROOT: Final = "/api/v1"
HOLD_SECONDS: Final = 25.0
"""How long a request for an answer is held; the SDK gives up after 45."""

LARGE_BYTES: Final = 2**20
"""Bodies from this size on are read beside the event loop."""

SIGNED: Final = "external_weights"
"""Below this, addresses carry a signature instead of the key, so that anything can download."""
SIGNED_SECONDS: Final = 3600
"""How long they are good for. The SDK asks for new ones five minutes before."""

OPERATION: Final = (404, 410)
"""How an operation is refused that gets no ticket; its other mistakes are its answer."""
ONE: Final = (400, 404)
"""How a request about one thing is refused."""

HOSTED: Final[Mapping[str, str]] = {
    "billing/": "billing",
    "audit": "audit log",
    "/project": "projects",
    "/trace_export": "traces of sessions",
    "auth/": "accounts: its one key is the one that it was started with",
    "create_custom_loss": "custom losses of its own; use forward_backward_custom",
}
"""What only the hosted service has, by a part of its paths."""

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
    mistakes = (UserError, wire.BadBody, ClientDisconnect)
    for status, errors in ((404, (Unknown,)), (410, (Gone,)), (400, mistakes), (403, (Unsigned,))):
        for error in errors:
            app.add_exception_handler(error, partial(_refusal, status))
    app.add_exception_handler(TransientError, partial(_refusal, 503))
    app.add_exception_handler(HTTPException, _no_such_endpoint)
    app.add_exception_handler(Exception, _failure)
    routes = _Routes(engine)
    routes.add_to(app)
    return _Guard(app, engine, api_key)


class _Guard:
    """Lets requests with the key through, once the engine is ready.

    `healthz` needs no key, and neither do addresses that carry a signature, which is checked there.
    """

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
        path = scope["path"]
        if path != f"{ROOT}/healthz" and not path.startswith(f"{ROOT}/{SIGNED}/"):
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
        self._rest = engine.rest
        self._signer = _Signer()

    def add_to(self, app: FastAPI) -> None:
        """Register every endpoint."""
        # Routes are tried in this order: those of every step and sample come first.
        table = [*self._steps(), *self._sessions(), *self._checkpoints()]
        for endpoint, handler in table:
            app.add_api_route(
                f"{ROOT}/{endpoint.path}",
                handler,
                methods=[endpoint.method],
                status_code=endpoint.status,
                response_class=Response,
                responses=endpoint.responses(),
                openapi_extra=endpoint.operation(),
            )
        describe(app, [endpoint for endpoint, _ in table])

    def _steps(self) -> Table:
        """What training and sampling consist of: operations, which are answered by a ticket."""
        engine = self._engine
        yield (
            _post(
                "retrieve_future",
                wire.RetrieveFuture,
                answers=(JSON, wire.PROTOBUF),
                refusals=(400, 404, 408, 410),
            ),
            self.retrieve_future,
        )
        yield _post("forward_backward", wire.PROTOBUF, refusals=OPERATION), self.forward_backward
        yield _post("asample", wire.Sample, refusals=OPERATION), self.asample
        numbered: tuple[tuple[str, type[Any], Callable[[Any], Ticket]], ...] = (
            ("optim_step", wire.OptimStep, engine.training.optim_step),
            ("save_weights", wire.SaveWeights, engine.storing.save_weights),
            ("save_weights_for_sampler", wire.SaveWeightsForSampler, engine.samplers.save_weights),
            (
                "save_weights_external",
                wire.SaveWeightsExternal,
                engine.storing.save_weights_external,
            ),
            ("load_weights", wire.LoadWeights, engine.storing.load_weights),
            ("create_model", wire.CreateModel, engine.models.create_model),
            ("unload_model", wire.OfModel, engine.models.unload_model),
        )
        for name, kind, submit in numbered:
            yield _post(name, kind, refusals=OPERATION), self._operation(kind, submit)

    def _sessions(self) -> Table:
        """Clients, what they may know, and what belongs to them."""
        page = {"offset": COUNT, "limit": COUNT}
        scope = {"access_scope": SCOPE}
        yield _post("create_session", wire.CreateSession), self.create_session
        yield (
            _post("session_heartbeat", wire.OfSession, refusals=(400, 404, 410)),
            self.session_heartbeat,
        )
        yield (
            _post(
                "sessions/{session_id}/finish",
                wire.FinishSession,
                status=204,
                refusals=(400, 404, 410),
            ),
            self.finish_session,
        )
        yield _post("sessions/search", wire.SearchSessions), self.search_sessions
        yield _get("sessions", query=page | scope, refusals=(400,)), self.list_sessions
        yield _get("sessions/{session_id}", query=scope), self.get_session
        yield (
            _post("create_sampling_session", wire.CreateSamplingSession, refusals=(400, 404, 410)),
            self.create_sampling_session,
        )
        yield _get("samplers/{sampler_id}", refusals=(404,)), self.get_sampler
        yield _post("get_info", wire.OfModel, refusals=(400, 404)), self.get_info
        yield _get("get_server_capabilities", refusals=()), self.get_server_capabilities
        yield _get("healthz", refusals=(), keyless=True), _constant({"status": "ok"})
        yield _post("client/config", None, refusals=()), _constant(CLIENT_CONFIG)
        yield _post("client/dynamic_config", None, refusals=()), _constant({})
        yield _post("telemetry", None, refusals=()), _constant({"status": "accepted"})

    def _checkpoints(self) -> Table:
        """Training runs, their checkpoints, and the files of these."""
        page = {"offset": COUNT, "limit": COUNT}
        one = "training_runs/{model_id}/checkpoints/{kind}/{name}"
        yield _post("weights_info", wire.TinkerPath), self.weights_info
        copying = {"X-Idempotency-Key": {"type": "string"}}
        yield (
            _post("copy_weights", wire.CopyWeights, headers=copying, refusals=(400, 404, 410)),
            self.copy_weights,
        )
        yield (
            _get("training_runs", query=page | {"access_scope": SCOPE}, refusals=(400,)),
            self.list_training_runs,
        )
        yield (
            _get("training_runs/{model_id}", query={"access_scope": SCOPE}),
            self.get_training_run,
        )
        yield _get("checkpoints", query=page, refusals=(400,)), self.list_every_checkpoint
        yield (
            _get("training_runs/{model_id}/checkpoints", refusals=()),
            self.list_checkpoints,
        )
        yield Endpoint("DELETE", one, status=204, refusals=ONE), self.delete_checkpoint
        publish = f"{one}/publish"
        yield Endpoint("POST", publish, status=204, refusals=ONE), self.publish_checkpoint
        yield Endpoint("DELETE", publish, status=204, refusals=ONE), self.unpublish_checkpoint
        yield Endpoint("PUT", f"{one}/ttl", wire.SetTtl, status=204, refusals=ONE), self.set_ttl
        yield _get(f"{one}/archive", answers=("application/x-tar",)), self.get_archive
        yield _get(f"{one}/external_weights_urls"), self.external_weights_urls
        signature = {"expires": COUNT | {"maximum": 10**10}, "signature": {"type": "string"}}
        yield (
            _get(
                f"{SIGNED}/{{model_id}}/{{name}}/{{file}}",
                query=signature,
                required=tuple(signature),
                answers=("application/octet-stream",),
                refusals=(400, 403, 404),
                keyless=True,
            ),
            self.get_file,
        )

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
            if len(raw) < LARGE_BYTES and not encoding:
                body = wire.read_pass(raw, encoding)
            else:
                body = await run_in_threadpool(wire.read_pass, raw, encoding)
        except wire.BadBody as error:
            return _ticket_response(self._engine.refuse_unread(error))
        return _ticket_response(self._engine.training.forward_backward(body))

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
        body = await _read(wire.FinishSession, request)
        self._engine.models.finish_session(request.path_params["session_id"], body)
        return Response(status_code=204)

    async def get_session(self, request: Request) -> Response:
        """What a session has made."""
        session_id = request.path_params["session_id"]
        return _json_response(self._rest.session(session_id, request.query_params))

    async def list_sessions(self, request: Request) -> Response:
        """A page of sessions."""
        return _json_response(self._rest.sessions(request.query_params))

    async def search_sessions(self, request: Request) -> Response:
        """A page of the sessions that match."""
        return _json_response(await self._rest.search(await _read(wire.SearchSessions, request)))

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
        return _json_response(self._rest.sampler(request.path_params["sampler_id"]))

    async def get_server_capabilities(self, request: Request) -> Response:
        """The one model that is served."""
        return _json_response(self._rest.capabilities())

    # -- training runs and checkpoints --

    async def list_training_runs(self, request: Request) -> Response:
        """A page of training runs, of this process and of earlier ones on the same store."""
        return _json_response(await self._rest.training_runs(request.query_params))

    async def get_training_run(self, request: Request) -> Response:
        """One training run."""
        run_id = request.path_params["model_id"]
        return _json_response(await self._rest.training_run(run_id, request.query_params))

    async def list_checkpoints(self, request: Request) -> Response:
        """The checkpoints of one training run."""
        return _json_response(await self._rest.checkpoints(request.path_params["model_id"]))

    async def list_every_checkpoint(self, request: Request) -> Response:
        """A page of all checkpoints."""
        return _json_response(await self._rest.every_checkpoint(request.query_params))

    async def weights_info(self, request: Request) -> Response:
        """What a checkpoint was trained as."""
        body = await _read(wire.TinkerPath, request)
        return _json_response(await self._rest.weights_info(body))

    async def copy_weights(self, request: Request) -> Response:
        """A checkpoint under a new model id; clients that ask again send the same key."""
        body = await _read(wire.CopyWeights, request)
        key = request.headers.get("x-idempotency-key") or str(uuid.uuid4())
        return _json_response({"tinker_path": str(await self._engine.storing.copy(body, key))})

    async def delete_checkpoint(self, request: Request) -> Response:
        """Remove a checkpoint."""
        await self._engine.storing.delete(_uri(request))
        return Response(status_code=204)

    async def publish_checkpoint(self, request: Request) -> Response:
        """Mark a checkpoint as public."""
        await self._engine.storing.set_public(_uri(request), True)
        return Response(status_code=204)

    async def unpublish_checkpoint(self, request: Request) -> Response:
        """Mark a checkpoint as not public."""
        await self._engine.storing.set_public(_uri(request), False)
        return Response(status_code=204)

    async def set_ttl(self, request: Request) -> Response:
        """Set when a checkpoint expires, or that it does not."""
        body = await _read(wire.SetTtl, request)
        await self._engine.storing.set_ttl(_uri(request), body.ttl_seconds)
        return Response(status_code=204)

    # -- files --

    async def get_archive(self, request: Request) -> Response:
        """A checkpoint's files as a tar archive."""
        uri = _uri(request)
        await self._engine.storing.existing(uri)
        folder, manifest = await self._engine.storing.fetch(uri)
        archive = await run_in_threadpool(_pack, folder, manifest)
        return FileResponse(
            archive,
            media_type="application/x-tar",
            filename=f"{manifest.name}.tar",
            background=BackgroundTask(archive.unlink),
        )

    async def external_weights_urls(self, request: Request) -> Response:
        """Addresses that a checkpoint's files can be had from without the key, for a while."""
        uri = _uri(request)
        if uri.kind != "external_weights":
            remedy = "save_weights_external makes one that can"
            raise UserError(Problem("kind", f"{uri} cannot be downloaded file by file", remedy))
        manifest = await self._engine.storing.existing(uri)
        expires = int(time.time()) + SIGNED_SECONDS
        urls = {
            file: f"{request.base_url}{ROOT[1:]}/{self._signer.sign(uri, file, expires)}"
            for file in manifest.files
        }
        moment = datetime.fromtimestamp(expires, UTC)
        return _json_response({"urls": urls, "expires": moment.isoformat()})

    async def get_file(self, request: Request) -> Response:
        """One file of an external checkpoint, at an address that was signed."""
        model_id, name, file = (request.path_params[key] for key in ("model_id", "name", "file"))
        self._signer.check((model_id, name, file), request.query_params)
        uri = CheckpointUri(model_id, "external_weights", name)
        await self._engine.storing.existing(uri)
        folder, manifest = await self._engine.storing.fetch(uri)
        if file not in manifest.files:
            raise Unknown(f"checkpoint {uri} has no file {file[:300]}")
        return FileResponse(folder / file, media_type="application/octet-stream", filename=file)


class Unsigned(Exception):
    """The address was not signed here, or is too old."""


class _Signer:
    """Signs addresses of files, as long as this process lives."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def sign(self, uri: CheckpointUri, file: str, expires: int) -> str:
        """The path below the root, with its signature; `expires` is in seconds since 1970."""
        parts = (uri.model_id, uri.name, file)
        path = "/".join(quote(part, safe="") for part in parts)
        return f"{SIGNED}/{path}?expires={expires}&signature={self._signature(parts, str(expires))}"

    def check(self, parts: tuple[str, str, str], query: Mapping[str, str]) -> None:
        """Raises Unsigned for an address that this engine did not give out, or not lately."""
        expires, given = query.get("expires", ""), query.get("signature", "")
        if not hmac.compare_digest(self._signature(parts, expires).encode(), given.encode()):
            raise Unsigned("this address was not signed by this engine: ask for a new one")
        if int(expires) < time.time():
            raise Unsigned("this address has expired: ask for a new one")

    def _signature(self, parts: tuple[str, str, str], expires: str) -> str:
        message = json.dumps([*parts, expires]).encode()
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()


# -- helpers -----------------------------------------------------------------------------------


def _post(
    path: str, body: type[wire.Body] | str | None, refusals: Sequence[int] = (400,), **more: Any
) -> Endpoint:
    return Endpoint("POST", path, body, refusals=refusals, **more)


def _get(path: str, refusals: Sequence[int] = ONE, **more: Any) -> Endpoint:
    return Endpoint("GET", path, refusals=refusals, **more)


def _constant(answer: Mapping[str, Any]) -> Handler:
    body = json.dumps(answer).encode()

    async def handler(request: Request) -> Response:
        return Response(body, media_type="application/json")

    return handler


async def _body(request: Request) -> bytes:
    """The body. Raises BadBody for one that is too large, which is not read to its end."""
    parts = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > wire.MAX_BODY_BYTES:
                problem = f"body: has over {wire.MAX_BODY_BYTES} bytes; send smaller batches"
                raise wire.BadBody(problem)
            parts.append(part)
    except ClientDisconnect:
        raise wire.BadBody("body: the connection ended within it") from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def _read(kind: type[B], request: Request) -> B:
    return wire.read_json(kind, await _body(request))


def _json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(json.dumps(content).encode(), status, headers, media_type=JSON)


def _ticket_response(ticket: Ticket, **more: Any) -> Response:
    return _json_response({"request_id": ticket.request_id, **more})


async def _refusal(status: int, request: Request, error: Exception) -> Response:
    return _json_response({"detail": str(error)}, status)


async def _no_such_endpoint(request: Request, error: Exception) -> Response:
    """A path or method that there is none of; what the hosted service alone has is named."""
    assert isinstance(error, HTTPException)
    path = request.url.path.removeprefix(f"{ROOT}/")
    absent = next((what for part, what in HOSTED.items() if part in path), None)
    detail = f"{request.method} {request.url.path[:300]}: {error.detail}"
    if absent is not None:
        detail = f"this engine has no {absent}"
    return _json_response({"detail": detail}, error.status_code, error.headers)


async def _failure(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _json_response({"detail": f"{type(error).__name__}: {error}"}, 500)


def _uri(request: Request) -> CheckpointUri:
    return CheckpointUri.parse("tinker://{model_id}/{kind}/{name}".format(**request.path_params))


def _pack(folder: Path, manifest: Manifest) -> Path:
    """A tar archive of a checkpoint's files, in a temporary file."""
    with tempfile.NamedTemporaryFile(prefix="flowtune-", suffix=".tar", delete=False) as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            for name in manifest.files:
                archive.add(folder / name, arcname=name)
        return Path(file.name)
