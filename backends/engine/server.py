"""The engine's process: check what can be checked, load, become ready, serve, stop.

    python -m backends.engine.server --base-model M --store DIR [--host H] [--port P]
        [--api-key tml-…] [--session-timeout S] [--device D] [--dtype T] [--threads N] [--announce]
        [--exit-with-parent]

The key is better given as FLOWTUNE_ENGINE_API_KEY, as arguments show in the list of processes.
With `--announce` exactly one line goes to stdout, when it is decided: `{"event": "ready", "url": …,
"port": …, "pid": …}`, or `{"event": "failed", "problems": [{"where", "what", "remedy"}, …]}`. With
`--exit-with-parent` the engine stops when its parent dies or its stdin ends: give it a pipe.
SIGTERM and SIGINT stop it too: what is computed is finished, the exit code is 0.

Importing this module loads neither torch nor the web framework.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import ipaddress
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from backends.base import HUB_NAME
from backends.child import Announcer, leave, when_parent_ends
from backends.engine import SESSION_SECONDS
from backends.errors import Problem, UserError

if TYPE_CHECKING:
    import uvicorn

    from backends.engine.abstract import AbstractBackend
    from backends.engine.checkpoints import CheckpointStore
    from backends.engine.service import Engine

log = logging.getLogger("flowtune.engine")

API_KEY_ENV: Final = "FLOWTUNE_ENGINE_API_KEY"
LOOPBACK: Final = "127.0.0.1"
KEEP_ALIVE_SECONDS: Final = 120
"""Longer than clients keep an idle connection, so that none is closed as it is used again."""
OMP_WAIT_POLICY: Final = "PASSIVE"
"""Threads that wait for each other sleep. Spinning, they fight the clients on the same machine for
the cores: with two cores and four busy processes a step took 5 to 100 times as long."""
STOP_SECONDS: Final = 2.0
"""How long the operation that runs may take to finish when the engine is stopped."""
GIL_SECONDS: Final = 0.001
"""How long computing may keep the interpreter from the requests that come in meanwhile."""


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is started with. `port` 0 takes a free one; `api_key` None the environment's.

    A session whose client shows no sign of life for `session_seconds` is ended, its models freed.
    `compute` are fields of `TorchConfig` (device, dtype, threads, …).
    """

    base_model: str
    store: str
    host: str = LOOPBACK
    port: int = 0
    api_key: str | None = field(default=None, repr=False)
    announce: bool = False
    exit_with_parent: bool = False
    session_seconds: float = SESSION_SECONDS
    compute: dict[str, Any] = field(default_factory=dict)


def serve(options: EngineOptions) -> None:
    """Run an engine until it is told to stop.

    Raises UserError, before anything is loaded, for a key, port, store or model that will not do;
    and for a model that then does not load.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", OMP_WAIT_POLICY)  # read when torch is imported
    announce = Announcer(options.announce)
    try:
        key = _api_key(options)
        _check_session_seconds(options.session_seconds)
        _check_model(options.base_model)
        with _listen(options.host, options.port) as listener:
            from backends.engine.checkpoints import CheckpointStore

            store = CheckpointStore(options.store)
            with contextlib.closing(store):
                store.check_writable()
                asyncio.run(_Process(options, key, listener, store, announce).run())
    except UserError as error:
        announce(event="failed", problems=[asdict(problem) for problem in error.problems])
        raise


class _Process:
    """One run of an engine, on the event loop."""

    def __init__(
        self,
        options: EngineOptions,
        key: str,
        listener: socket.socket,
        store: CheckpointStore,
        announce: Announcer,
    ) -> None:
        self._options = options
        self._key = key
        self._listener = listener
        self._store = store
        self._announce = announce
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Serve at once (`healthz` says 503), load, announce, and stop when asked to."""
        from backends.engine.service import Engine

        sys.setswitchinterval(GIL_SECONDS)
        seconds = self._options.session_seconds
        engine = Engine(self._options.base_model, self._store, session_seconds=seconds)
        server = _server(engine, self._key)
        with self._told_to_stop():
            serving = asyncio.create_task(server.serve(sockets=[self._listener]))
            loading = asyncio.create_task(self._load(engine))
            stopping = asyncio.create_task(self._stop.wait())
            await asyncio.wait([serving, loading, stopping], return_when=asyncio.FIRST_COMPLETED)
            failure = loading.exception() if loading.done() else None
            if failure is None:
                await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
            engine.stop()
            server.should_exit = True
            await serving
            for task in (loading, stopping):
                task.cancel()
        stopped = await engine.stopped(STOP_SECONDS)
        if failure is not None:
            raise failure
        log.info("stopped")
        if not stopped:
            # The compute thread cannot be interrupted, and must not outlive the interpreter.
            self._store.close()
            leave(0)

    async def _load(self, engine: Engine) -> None:
        log.info("loading %s", self._options.base_model)
        await engine.load(lambda: _make_backend(self._options))
        host, port = self._listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        limits = engine.capabilities
        log.info("ready at %s: %s, checkpoints in %s", url, limits, self._store.root)
        self._announce(event="ready", url=url, port=port, pid=os.getpid())

    @contextlib.contextmanager
    def _told_to_stop(self) -> Iterator[None]:
        """Have signals, and the end of stdin where wanted, set the event."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            loop.add_signal_handler(number, self._stop.set)
        if self._options.exit_with_parent:
            when_parent_ends(lambda: loop.call_soon_threadsafe(self._stop.set))
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


def _server(engine: Engine, key: str) -> uvicorn.Server:
    """uvicorn without its own signal handling, which would end the process by the signal."""
    import uvicorn

    from backends.engine.api import create_app

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    config = uvicorn.Config(
        create_app(engine, key),
        loop="asyncio",
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(STOP_SECONDS),
    )
    return Server(config)


def _make_backend(options: EngineOptions) -> AbstractBackend:
    """The torch backend. Raises UserError for a setting or model that will not do."""
    from pydantic import ValidationError

    from backends.engine.torch_backend import TorchBackend, TorchConfig

    try:
        config = TorchConfig(**options.compute)
    except ValidationError as error:
        problems = [
            Problem(".".join(map(str, problem["loc"])), problem["msg"])
            for problem in error.errors()
        ]
        raise UserError(*problems) from None
    return TorchBackend(options.base_model, config)


# -- checks ------------------------------------------------------------------------------------


def _api_key(options: EngineOptions) -> str:
    key = options.api_key or os.environ.get(API_KEY_ENV)
    if key and key.startswith(("tml-", "eyJ")) and key.isascii() and key.isprintable():
        return key
    raise UserError(
        Problem(
            "api_key",
            "does not start with tml-, which clients insist on" if key else "is missing",
            f"set {API_KEY_ENV}=tml-… or give --api-key tml-…",
        )
    )


def _check_session_seconds(seconds: float) -> None:
    if not 0 < seconds < math.inf:
        remedy = "give seconds, more than the 10 between two heartbeats"
        raise UserError(Problem("session_timeout", f"is {seconds:g}", remedy))


def _check_model(base_model: str) -> None:
    """Say at once that a folder is not there; a hub name is for the loading to find."""
    folder = Path(base_model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(
                Problem("base_model", f"{base_model} holds no config.json", "name a model's folder")
            )
    elif not HUB_NAME.fullmatch(base_model):
        raise UserError(
            Problem("base_model", f"there is no folder {base_model}", "correct the path")
        )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).version == 6:
            family = socket.AF_INET6
    # asyncio sends small answers at once only on sockets that are TCP by name: without the protocol
    # each waits 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
        return listener
    except (OSError, OverflowError) as error:
        listener.close()
        what, remedy = f"cannot listen on {host}:{port}: {error}", "take another host or port"
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            what = f"port {port} on {host} is taken"
            remedy = "stop what listens there, or take another port (0: any free one)"
        raise UserError(Problem("port", what, remedy)) from error


# -- the command line --------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0 stopped, 2 a user's mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m backends.engine.server", description="A Tinker-compatible engine."
    )
    parser.add_argument("--base-model", required=True, help="a hub name or a folder")
    parser.add_argument("--store", required=True, help="where checkpoints go: a folder or s3://…")
    parser.add_argument("--host", default=LOOPBACK)
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--api-key", help=f"tml-…; better given as {API_KEY_ENV}")
    parser.add_argument(
        "--session-timeout",
        type=float,
        default=SESSION_SECONDS,
        dest="session_seconds",
        help="seconds without a sign of life after which a client's models are unloaded",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"))
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--announce", action="store_true", help="say on stdout when it is ready")
    parser.add_argument("--exit-with-parent", action="store_true", help="stop when stdin ends")
    given = vars(parser.parse_args(arguments))
    compute = {name: given.pop(name) for name in ("device", "dtype", "threads")}
    compute = {name: value for name, value in compute.items() if value is not None}
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        serve(EngineOptions(**given, compute=compute))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    leave(main())
