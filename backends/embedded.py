"""The engine as a backend: one process on loopback for the length of a run.

It listens on a free port, takes a key that only this run knows, and keeps its checkpoints in a
scratch folder: what is to last is exported to the run's store. It stops when the run does, however
the run ends, since it also watches the pipe that this process holds.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from backends.base import BackendParams, ModelSpec, SamplingClient, SavedState, held_elsewhere
from backends.errors import FlowtuneError, Problem, StateLostError, UserError
from backends.tinker import (
    Server,
    TinkerBackend,
    connect,
    finish_session,
    frozen_sampling_client,
)

if TYPE_CHECKING:
    import tinker

    from backends.base import Backend

SCRATCH = "flowtune-engine-"
STOP_SECONDS = 10.0
CLOSE_SECONDS = 5.0
LOG_LINES_SHOWN = 15
EXPORTS_KEPT = 4
"""Exported states that stay: one whose publishing failed is exported again, beside later ones."""


class EmbeddedParams(BackendParams):
    """How the engine computes on this machine."""

    device: Literal["auto", "cpu", "cuda", "mps"] = Field("auto", description="Where it computes.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Of the frozen base model; auto is bfloat16 on CUDA, else float32."
    )
    threads: int | None = Field(None, ge=1, description="CPU threads; empty leaves torch's choice.")
    start_timeout_seconds: float = Field(
        600.0, gt=0, description="Longest wait for the model to load (a hub model is downloaded)."
    )

    def weights_problems(self, source: str, where: str) -> list[Problem]:
        """An engine is new with each run, and holds no weights yet."""
        if not source.startswith("tinker://"):
            return []
        return [held_elsewhere("an embedded engine", source, where)]


class EngineProcess:
    """A running engine, and the future that tells of its end."""

    def __init__(self, process: asyncio.subprocess.Process, scratch: Path, key: str) -> None:
        self.process = process
        self.scratch = scratch
        self.key = key
        self.url = ""
        self.ended = asyncio.ensure_future(process.wait())

    @classmethod
    async def start(cls, params: EmbeddedParams, base_model: str, key: str) -> EngineProcess:
        """Start one and wait until it has the model. Raises UserError for a model that won't do."""
        _remove_abandoned()
        scratch = Path(tempfile.mkdtemp(prefix=f"{SCRATCH}{os.getpid()}-"))
        with (scratch / "engine.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *_command(params, base_model, scratch / "checkpoints"),
                env={**os.environ, "FLOWTUNE_ENGINE_API_KEY": key},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # a Ctrl-C is for the run, which then stops the engine
            )
        engine = cls(process, scratch, key)
        try:
            async with asyncio.timeout(params.start_timeout_seconds):
                engine.url = await engine._announced()
        except TimeoutError:
            await engine.stop()
            raise UserError(
                Problem(
                    "backend.params.start_timeout_seconds",
                    f"{base_model} was not loaded after {params.start_timeout_seconds:g} s",
                    "give it longer",
                )
            ) from None
        except BaseException:
            await engine.stop()
            raise
        return engine

    async def _announced(self) -> str:
        """The address it serves at."""
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            await self.ended
            raise self.lost()
        said: dict[str, Any] = json.loads(line)
        if said["event"] != "ready":
            raise UserError(*(_in_the_experiment(Problem(**p)) for p in said["problems"]))
        return str(said["url"])

    def lost(self) -> StateLostError:
        """What to say once it has ended: the exit code and the end of its log."""
        code = self.process.returncode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"exited {code}"
        try:
            log = (self.scratch / "engine.log").read_text(errors="replace")
        except FileNotFoundError:
            return StateLostError("the engine was stopped")
        tail = "\n".join(f"    {line}" for line in log.splitlines()[-LOG_LINES_SHOWN:])
        return StateLostError(f"the engine {how}; its last words:\n{tail}")

    async def stop(self) -> None:
        """End it, gently and then not, and remove its scratch folder."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.terminate()
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await asyncio.shield(self.ended)
            except TimeoutError:
                with suppress(ProcessLookupError):
                    self.process.kill()
                await self.ended
        await asyncio.to_thread(shutil.rmtree, self.scratch, ignore_errors=True)


@dataclass(frozen=True)
class OtherEngine:
    """An engine beside the one that trains, for a model of its own, with a session to sample."""

    engine: EngineProcess
    service: tinker.ServiceClient


class OtherEngines:
    """Engines for other models than the one in training, each started when first asked for."""

    def __init__(self, params: EmbeddedParams) -> None:
        self._params = params
        self._started: dict[str, asyncio.Task[OtherEngine]] = {}

    async def get(self, model: str) -> OtherEngine:
        """The engine of a model. Raises UserError for a model that will not do."""
        name = _resolved(model)
        if name not in self._started:
            self._started[name] = asyncio.ensure_future(self._start(model))
        try:
            return await asyncio.shield(self._started[name])
        except UserError:
            self._started.pop(name, None)
            raise

    async def _start(self, model: str) -> OtherEngine:
        import tinker

        engine = await _start(self._params, ModelSpec(name=model))
        service = tinker.ServiceClient(base_url=engine.url, api_key=engine.key)
        return OtherEngine(engine, service)

    async def stop(self) -> None:
        """Stop all of them, those that are only just starting too."""
        started = list(self._started.values())
        self._started.clear()
        for task in started:
            task.cancel()
        if started:
            await asyncio.wait(started)
        for task in started:
            if not task.cancelled() and task.exception() is None:
                await _end(task.result().engine, task.result().service)


class EmbeddedBackend(TinkerBackend):
    """A training client on an engine of its own."""

    engine: EngineProcess
    others: OtherEngines
    _exported: tuple[Path, ...] = ()

    async def open_sampling_client(
        self, model: str | None = None, weights: str | None = None
    ) -> SamplingClient:
        """A client on this engine, or for another model on an engine of its own.

        `weights` are a checkpoint's folder, or an address that this engine gave out.
        """
        engine, service = self.engine, self._service
        if model is not None and _resolved(model) != _resolved(self._model_name):
            try:
                other = await self.others.get(model)
            except UserError as error:
                raise UserError(
                    *(Problem(_of_other(p.where), p.what, p.remedy) for p in error.problems)
                ) from error
            engine, service = other.engine, other.service
        if weights is not None and not weights.startswith("tinker://"):
            weights = await asyncio.to_thread(_import_weights, engine.scratch, weights)
        server = Server(engine.ended, engine.lost)
        base = (model or self._model_name) if weights is None else None
        return await frozen_sampling_client(service, server, base, weights)

    async def export_state(self, uri: str, folder: Path) -> bool:
        """Link or copy the checkpoint's files out of the scratch folder."""
        await asyncio.to_thread(self._export, uri, folder)
        return True

    def _export(self, uri: str, folder: Path) -> None:
        from backends.engine.checkpoints import MANIFEST, CheckpointUri

        source = self.engine.scratch / "checkpoints" / CheckpointUri.parse(uri).prefix
        for file in source.iterdir():
            if file.name == MANIFEST:
                continue
            try:
                (folder / file.name).hardlink_to(file)
            except OSError:  # another file system
                shutil.copyfile(file, folder / file.name)
        if source not in self._exported:
            self._exported = (*self._exported, source)
        # The run's store has the earlier ones; without this they pile up in the scratch folder.
        for old in self._exported[:-EXPORTS_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        self._exported = self._exported[-EXPORTS_KEPT:]

    def discard_state(self, uri: str) -> None:
        """Nothing: exported states leave the scratch folder by themselves (see `_export`)."""

    async def aclose(self) -> None:
        """Finish the session, and stop the engine and those of other models."""
        try:
            await self.others.stop()
        finally:
            await _end(self.engine, self._service)


class EmbeddedKind:
    """An engine on this machine, started for the run and stopped with it."""

    kind: ClassVar[str] = "embedded"
    Params: ClassVar[type[BackendParams]] = EmbeddedParams

    @staticmethod
    def check(params: EmbeddedParams, model: ModelSpec) -> list[Problem]:
        """The model's folder is looked at by the general checks; nothing else can be wrong."""
        return []

    @staticmethod
    async def open(params: EmbeddedParams, model: ModelSpec, state: SavedState | None) -> Backend:
        """Start an engine, bring it the saved state if there is one, and hand out a client.

        One that `started_early` is taken, if it is the one that is wanted.
        """
        importing = asyncio.ensure_future(asyncio.to_thread(_import_client))
        try:
            engine = await (_take_early(params, model) or _start(params, model))
        finally:
            # Whoever opens again at once would import in another thread the same modules, and find
            # them half made.
            await importing
        try:
            if state is not None:
                state = await asyncio.to_thread(_bring, engine.scratch / "checkpoints", state)
            server = Server(engine.ended, engine.lost)
            backend = await connect(EmbeddedBackend, engine.url, engine.key, model, state, server)
        except BaseException:
            await engine.stop()
            raise
        backend.engine, backend.others = engine, OtherEngines(params)
        return backend


async def _end(engine: EngineProcess, service: tinker.ServiceClient) -> None:
    """Finish a session, then stop its engine; an engine that has ended is left at that."""
    try:
        if not engine.ended.done():
            async with asyncio.timeout(CLOSE_SECONDS):
                await finish_session(service)
    except (TimeoutError, FlowtuneError):
        pass  # the engine is stopped all the same, and the session ends with it
    finally:
        await engine.stop()


_Early = tuple[EmbeddedParams, str, asyncio.Task[EngineProcess]]
_early: list[_Early] = []
"""Engines that were started before anyone asked for them: how, with which model."""


@asynccontextmanager
async def started_early(params: BackendParams, model: ModelSpec) -> AsyncIterator[None]:
    """Start an engine while the block still gets ready for it; nothing, for other backends.

    The first `EmbeddedKind.open` with these parameters takes it; if none does, it is stopped.
    """
    if not isinstance(params, EmbeddedParams):
        yield
        return
    early = (params, model.name, asyncio.create_task(_start(params, model)))
    _early.append(early)
    try:
        yield
    finally:
        if early in _early:
            _early.remove(early)
            await _discard(early[2])


def _take_early(params: EmbeddedParams, model: ModelSpec) -> asyncio.Task[EngineProcess] | None:
    for early in _early:
        if early[:2] == (params, model.name):
            _early.remove(early)
            return early[2]
    return None


async def _discard(starting: asyncio.Task[EngineProcess]) -> None:
    starting.cancel()
    with suppress(asyncio.CancelledError, FlowtuneError):
        await (await starting).stop()


def _start(params: EmbeddedParams, model: ModelSpec) -> Coroutine[Any, Any, EngineProcess]:
    key = f"tml-{secrets.token_urlsafe(32)}"
    return EngineProcess.start(params, model.name, key)


def _import_client() -> None:
    """What takes seconds to import, while the engine's process does the same."""
    import tinker  # noqa: F401
    from transformers import AutoTokenizer  # noqa: F401


def _command(params: EmbeddedParams, base_model: str, store: Path) -> list[str]:
    chosen = {"device": params.device, "dtype": params.dtype, "threads": params.threads}
    options = [f"--{name}={value}" for name, value in chosen.items() if value not in (None, "auto")]
    return [
        sys.executable,
        "-m",
        "backends.engine.server",
        f"--base-model={base_model}",
        f"--store={store}",
        "--announce",
        "--exit-with-parent",
        *options,
    ]


def _bring(store: Path, state: SavedState) -> SavedState:
    """Put a saved state's files where the engine finds them."""
    from backends.engine.checkpoints import import_folder

    if state.folder is None:
        raise UserError(held_elsewhere("an embedded engine", state.uri, "model.init_from"))
    uri = import_folder(store, "start", state.folder)
    return SavedState(uri, None, state.optimizer)


def _import_weights(scratch: Path, weights: str) -> str:
    """Put a checkpoint's folder where an engine finds it; the URI that it loads by. Blocks."""
    from backends.engine.checkpoints import import_folder

    folder = Path(weights).expanduser()
    if "://" in weights or not (folder / "adapter_model.safetensors").is_file():
        raise UserError(
            Problem(
                "weights",
                f"{weights} is no folder with an adapter_model.safetensors",
                "give the folder of a checkpoint, as a run's checkpoints/step-… is",
            )
        )
    return import_folder(scratch / "checkpoints", f"frozen-{secrets.token_hex(8)}", folder)


def _resolved(model: str) -> str:
    """A model's folder by its full path, a hub name as it is."""
    folder = Path(model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model


def _of_other(where: str) -> str:
    return "model" if where == "model.name" else where


def _in_the_experiment(problem: Problem) -> Problem:
    """The engine's own option names in the words of the experiment."""
    where = {"base_model": "model.name"}.get(problem.where, problem.where)
    return Problem(where, problem.what, problem.remedy)


def _remove_abandoned() -> None:
    """Remove scratch folders of runs that were killed: their process is gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*-*"):
        pid = folder.name.removeprefix(SCRATCH).partition("-")[0]
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except (ValueError, PermissionError):
            continue
