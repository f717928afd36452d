"""A proxy in front of an S3 service, over which requests go wrong, in one way each.

busy          answered 503 SlowDown, and the service does not see it
reset         the connection is reset before the service sees it
cut upload    half of the body reaches the service, then both connections are reset
lost answer   the service does it, and the connection is reset instead of an answer
cut answer    the service does it, and the connection ends after half of the answer's body
held          nothing happens until `release`, then the connection is reset; `arrived` tells

It passes bytes on as they are, `Host` included, so that signatures stay valid. One connection
carries one request.
"""

from __future__ import annotations

import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

Way = Literal["busy", "reset", "cut upload", "lost answer", "cut answer", "held"]
WAYS: Final[tuple[Way, ...]] = get_args(Way)

SLOW_DOWN: Final = (
    b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>SlowDown</Code>'
    b"<Message>Please reduce your request rate.</Message></Error>"
)


@dataclass(frozen=True)
class Request:
    """What is known of a request before its body is read."""

    method: str
    target: str
    head: bytes

    def header(self, name: str) -> str | None:
        """One header of it, or None."""
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.strip().lower() == name.encode():
                return value.strip().decode()
        return None


def every(request: Request) -> bool:
    """All requests."""
    return True


@dataclass
class FaultyS3:
    """The proxy while it runs. `fail` says what goes wrong from then on."""

    upstream: tuple[str, int]
    url: str = ""
    requests: list[Request] = field(default_factory=list)
    failed: list[Request] = field(default_factory=list)
    arrived: threading.Event = field(default_factory=threading.Event)
    _way: Way = "busy"
    _which: Callable[[Request], bool] = every
    _left: int = 0
    _released: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(
        self, way: Way, which: Callable[[Request], bool] = every, *, times: int = 10**9
    ) -> None:
        """Let the next so many requests that `which` chooses go wrong."""
        with self._lock:
            self._way, self._which, self._left = way, which, times
            self.failed.clear()
            self.arrived.clear()
            self._released.clear()

    def heal(self) -> None:
        """Let every request go right again."""
        self.fail("busy", times=0)

    def release(self) -> None:
        """End what is held, without an answer."""
        self._released.set()

    def serve(self, client: socket.socket) -> None:
        """One connection: read a request, pass it on or fail to."""
        head, body = _read_head(client)
        if not head:
            return
        method, target = head.split(b" ", 2)[:2]
        request = Request(method.decode(), target.decode(), head)
        way = self._fate(request)
        if way == "busy":
            length = b"Content-Length: %d\r\n" % len(SLOW_DOWN)
            client.sendall(b"HTTP/1.1 503 Slow Down\r\nConnection: close\r\n" + length + b"\r\n")
            client.sendall(SLOW_DOWN)
        elif way == "reset":
            _reset(client)
        elif way == "held":
            self.arrived.set()
            self._released.wait()
            _reset(client)
        else:
            self._pass_on(client, request, body, way)

    def _fate(self, request: Request) -> Way | None:
        with self._lock:
            self.requests.append(request)
            if self._left and self._which(request):
                self._left -= 1
                self.failed.append(request)
                return self._way
        return None

    def _pass_on(
        self, client: socket.socket, request: Request, body: bytes, way: Way | None
    ) -> None:
        size = int(request.header("content-length") or 0)
        if request.header("expect"):
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        while len(body) < size and (part := client.recv(2**16)):
            body += part
        with socket.create_connection(self.upstream) as service:
            service.sendall(_single(request.head))
            if way == "cut upload":
                service.sendall(body[: size // 2])
                _reset(service)
                _reset(client)
                return
            service.sendall(body)
            answer = bytearray()
            while part := service.recv(2**16):
                answer += part
        if way == "lost answer":
            _reset(client)
        elif way == "cut answer":
            head_ends = answer.index(b"\r\n\r\n") + 4
            client.sendall(answer[: head_ends + (len(answer) - head_ends) // 2])
        else:
            client.sendall(answer)


def _read_head(client: socket.socket) -> tuple[bytes, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        part = client.recv(2**16)
        if not part:
            return b"", b""
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    return head, body


def _single(head: bytes) -> bytes:
    """The head for the service: it answers once, and with no `100 Continue` before."""
    lines = head.split(b"\r\n")
    kept = [line for line in lines if not line.lower().startswith((b"expect:", b"connection:"))]
    return b"\r\n".join([*kept, b"Connection: close", b"", b""])


def _reset(connection: socket.socket) -> None:
    """Close with RST, which no reader can take for the end of an answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@contextmanager
def faulty_s3(endpoint: str) -> Iterator[FaultyS3]:
    """Serve the proxy on a free loopback port for the length of the block."""
    host, _, port = endpoint.removeprefix("http://").partition(":")
    proxy = FaultyS3((host, int(port)))

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(ConnectionError):  # the client gave up, or was killed
                proxy.serve(self.request)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True

        def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
            with suppress(OSError):  # it was reset
                super().shutdown_request(request)

    with Server(("127.0.0.1", 0), Handler) as server:
        proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield proxy
        finally:
            proxy.release()
            server.shutdown()
