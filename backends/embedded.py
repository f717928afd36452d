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
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from backends.base import BackendParams, ModelSpec, SavedState
from backends.errors import FlowtuneError, Problem, StateLostError, UserError
from backends.tinker import Server, TinkerBackend, connect

if TYPE_CHECKING:
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


class EngineProcess:
    """A running engine, and the future that tells of its end."""

    def __init__(self, process: asyncio.subprocess.Process, scratch: Path, url: str) -> None:
        self.process = process
        self.scratch = scratch
        self.url = url
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
        engine = cls(process, scratch, "")
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
        lines = (self.scratch / "engine.log").read_text(errors="replace").splitlines()
        tail = "\n".join(f"    {line}" for line in lines[-LOG_LINES_SHOWN:])
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


class EmbeddedBackend(TinkerBackend):
    """A training client on an engine of its own."""

    engine: EngineProcess
    _exported: tuple[Path, ...] = ()

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

    async def aclose(self) -> None:
        """Finish the session, then stop the engine; an engine that has ended is left at that."""
        try:
            if not self.engine.ended.done():
                async with asyncio.timeout(CLOSE_SECONDS):
                    await super().aclose()
        except (TimeoutError, FlowtuneError):
            pass  # the engine is stopped all the same, and the session ends with it
        finally:
            await self.engine.stop()


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
        """Start an engine, bring it the saved state if there is one, and hand out a client."""
        key = f"tml-{secrets.token_urlsafe(32)}"
        engine = await EngineProcess.start(params, model.name, key)
        try:
            if state is not None:
                state = await asyncio.to_thread(_bring, engine.scratch / "checkpoints", state)
            server = Server(engine.ended, engine.lost)
            backend = await connect(EmbeddedBackend, engine.url, key, model, state, server)
        except BaseException:
            await engine.stop()
            raise
        backend.engine = engine
        return backend


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
        raise UserError(
            Problem(
                "model.init_from",
                f"an embedded engine cannot read {state.uri}",
                "give the folder of a checkpoint, or train on the server that holds it",
            )
        )
    uri = import_folder(store, "start", state.folder)
    return SavedState(uri, None, state.optimizer)


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
