"""Locks: nothing in a request's line, headers, path or query makes the engine answer 5xx.

Bytes on a socket, and what schemathesis makes of the engine's own OpenAPI document.
"""

from __future__ import annotations

import socket
from typing import Any, Final

import httpx
import pytest
import schemathesis
from engine_process import KEY, EngineProcess
from hostile import tries
from hypothesis import given
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    ignored_auth,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

HEADERS: Final = {"X-API-Key": KEY}


# -- bytes -------------------------------------------------------------------------------------


def lines(first: str, *headers: str, body: str = "") -> bytes:
    """A request with the key, after whose answer the connection is closed."""
    all_headers = ["Host: x", f"X-API-Key: {KEY}", "Connection: close", *headers]
    return "\r\n".join([f"{first} HTTP/1.1", *all_headers, "", body]).encode("latin-1")


GET, POST = "GET /api/v1/healthz", "POST /api/v1/create_session"
ARCHIVE = "/api/v1/training_runs/{}/checkpoints/weights/{}/archive"
WEBSOCKET = ("Upgrade: websocket", "Sec-WebSocket-Version: 13", f"Sec-WebSocket-Key: {'A' * 22}==")

BYTES: Final[dict[str, bytes]] = {
    "garbage": b"\x16\x03\x01\x00\x00",
    "http 2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no headers": b"GET /api/v1/healthz HTTP/1.0\r\n\r\n",
    "unknown method": lines("FOO /api/v1/healthz"),
    "trace": lines("TRACE /api/v1/healthz"),
    "connect": lines("CONNECT x:80"),
    "options": lines("OPTIONS *"),
    "raw path": lines("GET /api/v1/samplers/\xff\xfe"),
    "escaped path": lines("GET /api/v1/samplers/%ff%00%zz"),
    "long path": lines("GET /api/v1/samplers/" + "a" * 60_000),
    "climbing path": lines("GET " + ARCHIVE.format("%2e%2e", "..%2f..%2fx")),
    "climbing name": lines("GET " + ARCHIVE.format("m", "%2e%2e")),
    "nul in a name": lines("GET " + ARCHIVE.format("m", "a%00b")),
    "odd query": lines("GET /api/v1/checkpoints?limit=%ff&offset=-1&limit=&&==;"),
    "huge query": lines("GET /api/v1/checkpoints?limit=" + "9" * 5000),
    "other digits": lines("GET /api/v1/checkpoints?limit=%D9%A3"),
    "absolute": lines("GET http://elsewhere/api/v1/healthz"),
    "redirected host": b"GET /api/v1/healthz/ HTTP/1.1\r\nHost: [\r\nConnection: close\r\n\r\n",
    "websocket": lines(GET, *WEBSOCKET).replace(b"Connection: close", b"Connection: Upgrade"),
    "long header": lines(GET, "X-Long: " + "a" * 60_000),
    "many headers": lines(GET, *["X-Many: a"] * 5000),
    "key of odd bytes": lines(GET).replace(KEY.encode(), b"\xff\xfe"),
    "length no number": lines(POST, "Content-Length: x", body="{}"),
    "length below 0": lines(POST, "Content-Length: -5", body="{}"),
    "length without end": lines(POST, "Content-Length: " + "9" * 30, body="{}"),
    "two lengths": lines(POST, "Content-Length: 2", "Content-Length: 3", body="{}x"),
    "length and chunks": lines(POST, "Content-Length: 4", "Transfer-Encoding: chunked", body="0"),
    "no chunk": lines(POST, "Transfer-Encoding: chunked", body="zz\r\n{}\r\n0\r\n\r\n"),
    "unknown encoding": lines(
        "POST /api/v1/forward_backward", "Content-Encoding: \xff", "Content-Length: 0"
    ),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_on_the_wire(shared_engine: EngineProcess, name: str) -> None:
    answer = _exchange(shared_engine, BYTES[name])
    assert answer.startswith(b"HTTP/1.1 "), answer
    assert int(answer.split()[1]) < 500, answer


def _exchange(shared_engine: EngineProcess, request: bytes) -> bytes:
    address = ("127.0.0.1", int(shared_engine.url.rpartition(":")[2]))
    with socket.create_connection(address, timeout=5) as connection:
        connection.sendall(request)
        answer = b""
        while b"\r\n\r\n" not in answer and (part := connection.recv(65536)):
            answer += part
    return answer


@pytest.mark.parametrize("path", ["create_session", "optim_step", "forward_backward", "asample"])
def test_who_hangs_up_is_no_error(shared_engine: EngineProcess, path: str) -> None:
    """Whoever started the engine sees to it that no error is logged."""
    address = ("127.0.0.1", int(shared_engine.url.rpartition(":")[2]))
    with socket.create_connection(address, timeout=5) as connection:
        connection.sendall(lines(f"POST /api/v1/{path}", "Content-Length: 50", body="{"))


def test_the_key_is_compared_as_bytes(shared_engine: EngineProcess) -> None:
    for headers in ({}, {"X-API-Key": ""}, {"X-API-Key": KEY[:-1]}, {"X-API-Key": KEY + "x"}):
        answer = httpx.get(f"{shared_engine.url}/api/v1/checkpoints", headers=headers)
        assert answer.status_code == 401
        assert KEY not in answer.text
    twice = [("X-API-Key", "tml-wrong"), ("X-API-Key", KEY)]
    assert httpx.get(f"{shared_engine.url}/api/v1/checkpoints", headers=twice).status_code == 401


# -- the OpenAPI document ----------------------------------------------------------------------


CHECKS: Final[list[Any]] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    unsupported_method,
    ignored_auth,
]


@schemathesis.serializer("application/x-protobuf")
def _as_it_is(context: schemathesis.SerializationContext, value: Any) -> Any:
    """Raw bytes; what bytes there can be is for test_hostile_protobuf."""
    return value if isinstance(value, bytes) else str(value).encode()


def test_it_does_what_its_document_says(shared_engine: EngineProcess) -> None:
    document = schemathesis.openapi.from_url(f"{shared_engine.url}/openapi.json", headers=HEADERS)
    operations = [found.ok() for found in document.get_all_operations()]
    assert len(operations) > 20
    for operation in operations:

        @tries(bodies=8)
        @given(operation.as_strategy())
        def attempt(case: schemathesis.Case) -> None:
            case.call_and_validate(headers=HEADERS, checks=CHECKS)

        attempt()
