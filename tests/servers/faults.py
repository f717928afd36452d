"""A proxy between the SDK and an engine over which requests go wrong, in one way each.

refused   every fifth request is answered 503, and the engine does not see it
lost      every fifth is done by the engine, and answered 500 all the same
cut       every fifth is done, and its answer breaks off with the connection
doubled   every one is sent twice, and the second answer is given
echoed    every one is sent again a while later, when others have been done
shuffled  every one waits for a moment of its own, so that neighbours change places
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal, get_args

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tests.servers.proxy import UNRETURNED, UNSENT, serve

Way = Literal["refused", "lost", "cut", "doubled", "echoed", "shuffled"]
WAYS: Final[tuple[Way, ...]] = get_args(Way)
CHUNK: Final = 2
"""Datums in one post: batches come in several, which the SDK posts side by side."""
LEFT_ALONE: Final = {"telemetry", "session_heartbeat", "config", "dynamic_config"}


class _CutOff(Response):
    """An answer that promises more bytes than come; the server then closes the connection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"1000")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{", "more_body": True})


class _Line:
    """One way for requests to go wrong; `way` None is the way that they go right."""

    def __init__(self, upstream: str, way: Way | None, faults: Counter[str]) -> None:
        self._client = httpx.AsyncClient(base_url=upstream, timeout=60)
        self._way = way
        self._faults = faults
        self._seen: Counter[str] = Counter()
        self._chance = random.Random(0)
        self._echoes: set[asyncio.Task[Any]] = set()

    async def handle(self, request: Request) -> Response:
        """Pass a request on, or fail to."""
        name = request.url.path.rsplit("/", 1)[-1]
        body = await request.body()
        if self._way is None or request.method == "GET" or name in LEFT_ALONE:
            return await self._pass_on(request, name, body)
        self._seen[name] += 1
        fifth = self._seen[name] % 5 == 1
        if fifth or self._way not in ("refused", "lost", "cut"):
            self._faults[name] += 1
            return await self._fail(request, name, body)
        return await self._pass_on(request, name, body)

    async def _fail(self, request: Request, name: str, body: bytes) -> Response:
        if self._way == "refused":
            return Response(b"{}", 503)
        if self._way == "shuffled":
            await asyncio.sleep(self._chance.uniform(0, 0.05))
        answer = await self._pass_on(request, name, body)
        if self._way == "lost":
            return Response(b"{}", 500)
        if self._way == "cut":
            return _CutOff()
        if self._way == "doubled":
            return await self._pass_on(request, name, body)
        if self._way == "echoed":
            echo = asyncio.create_task(self._echo(request, name, body))
            self._echoes.add(echo)
            echo.add_done_callback(self._echoes.discard)
        return answer

    async def _echo(self, request: Request, name: str, body: bytes) -> None:
        await asyncio.sleep(0.1)
        await self._pass_on(request, name, body)

    async def _pass_on(self, request: Request, name: str, body: bytes) -> Response:
        headers = {k: v for k, v in request.headers.items() if k not in UNSENT}
        target = request.url.path
        query = dict(request.query_params)
        try:
            answer = await self._client.request(
                request.method, target, params=query, headers=headers, content=body
            )
        except httpx.TransportError:  # the engine is gone
            return Response(b"{}", 502)
        content = answer.content
        if name == "config":
            flags = json.loads(content) | {"fwdbwd_max_chunk_len": CHUNK}
            content = json.dumps(flags).encode()
        kept = {k: v for k, v in answer.headers.items() if k not in UNRETURNED}
        return Response(content, answer.status_code, kept)


@contextmanager
def faulty_proxy(upstream: str, way: Way | None) -> Iterator[tuple[str, Counter[str]]]:
    """Serve it on a free loopback port: its URL, and how often what went wrong, by endpoint."""
    faults: Counter[str] = Counter()
    line = _Line(upstream, way, faults)
    methods = ["GET", "POST", "PUT", "DELETE"]
    with serve(Starlette(routes=[Route("/{path:path}", line.handle, methods=methods)])) as url:
        yield url, faults
