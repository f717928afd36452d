"""A recording proxy between the SDK and an engine: what was sent, in which order, and when."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

UNSENT = {"host", "content-length", "transfer-encoding", "connection"}
UNRETURNED = UNSENT | {"content-encoding"}


@dataclass
class Recording:
    """Requests as they arrived, by the last part of their path.

    With `hold` and `until` set, requests of the one name wait until one of the other has arrived.
    So many of the next polls as `pauses` has reasons are told that the queue is paused.
    """

    url: str = ""
    arrived: list[str] = field(default_factory=list)
    hold: str | None = None
    until: str | None = None
    pauses: list[str] = field(default_factory=list)
    _arrival: asyncio.Event = field(default_factory=asyncio.Event)

    async def note(self, name: str) -> None:
        """Write a request down, and keep it waiting if it is one to be held."""
        self.arrived.append(name)
        if name == self.until:
            self._arrival.set()
        if name == self.hold:
            await self._arrival.wait()


def _application(upstream: str, recording: Recording) -> Starlette:
    client = httpx.AsyncClient(base_url=upstream, timeout=60)

    async def forward(request: Request) -> Response:
        name = request.url.path.rsplit("/", 1)[-1]
        await recording.note(name)
        if name == "retrieve_future" and recording.pauses:
            paused = {"type": "try_again", "request_id": "", "queue_state": "paused_capacity"}
            return JSONResponse(paused | {"queue_state_reason": recording.pauses.pop(0)}, 408)
        headers = {k: v for k, v in request.headers.items() if k not in UNSENT}
        answer = await client.request(
            request.method,
            request.url.path,
            params=dict(request.query_params),
            headers=headers,
            content=await request.body(),
        )
        kept = {k: v for k, v in answer.headers.items() if k not in UNRETURNED}
        return Response(answer.content, answer.status_code, kept)

    methods = ["GET", "POST", "PUT", "DELETE"]
    return Starlette(routes=[Route("/{path:path}", forward, methods=methods)])


@contextmanager
def recording_proxy(upstream: str) -> Iterator[Recording]:
    """Serve the proxy on a free loopback port for the length of the block."""
    recording = Recording()
    with serve(_application(upstream, recording)) as url:
        recording.url = url
        yield recording


@contextmanager
def serve(application: Starlette) -> Iterator[str]:
    """Serve an application on a free loopback port, in a thread of its own; yields its URL."""
    # With its protocol named, asyncio sets TCP_NODELAY; without, each answer takes 40 ms longer.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(application, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
