"""One run, what it trains on, and what can be killed about it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

import yaml

from tests.chaos.processes import (
    MODEL,
    Attempt,
    KillableServer,
    PrefectRuns,
    ServedEngine,
    wait_until,
)
from tests.servers.faults import Way, faulty_proxy
from tests.servers.prefect import PrefectServer

Victim = Literal["flow", "engine", "prefect", "all"]
VICTIMS: Final[tuple[Victim, ...]] = get_args(Victim)
FLOWTUNE: Final = "import tests.chaos.flow; from flows.cli import main; main()"
ATTEMPT_SECONDS: Final = 300.0
LOG_LINES_SHOWN: Final = 30


@dataclass(frozen=True)
class Course:
    """What is trained, on what, and who starts it.

    `proxied`: on a served engine behind a proxy, else on one of the run's own. `deployed`: as a
    flow run of a deployment, which `prefect flow-run retry` continues, else by `flowtune run`.
    """

    name: str
    algorithm: Mapping[str, Any]
    proxied: bool = False
    deployed: bool = False


def courses(steps: int) -> tuple[Course, ...]:
    """Everything that is disturbed, by turns; courses of one name train the same."""
    common = {"batch_size": 4, "lora_rank": 8, "save_every": 4}
    sft = {"kind": "sft", "params": common | {"learning_rate": 2e-3, "max_steps": steps}}
    sampling = {"kind": "sampling", "params": common | {"max_steps": steps // 2}}
    rollouts = {"num_samples": 6, "max_tokens": 12}  # one answer in nine is a bare number
    # Checkpoints fall between the two steps of a batch, and before batches sampled earlier.
    overlapping = {"num_substeps": 2, "max_staleness": 1, "save_every": 5}
    rl = {"kind": "rl", "params": common | rollouts | overlapping | {"max_steps": steps // 2}}
    return (
        Course("sft", sft),
        Course("proxied-rl", rl, proxied=True, deployed=True),
        Course("proxied-sft", sft, proxied=True),
        Course("rl", rl, deployed=True),
        Course("sft", sft, deployed=True),
        Course("proxied-sampling", sampling, proxied=True),
        Course("proxied-sft", sft, proxied=True, deployed=True),
        Course("rl", rl),
        Course("proxied-rl", rl, proxied=True),
        Course("sampling", sampling, deployed=True),
    )


@dataclass
class Servers:
    """What outlives the runs. Without `killable` the Prefect server is left alone."""

    prefect: PrefectServer
    killable: KillableServer | None = None
    engine: ServedEngine | None = None

    def served(self, folder: Path) -> ServedEngine:
        """The engine of all proxied runs, started when the first one needs it."""
        if self.engine is None:
            self.engine = ServedEngine(folder)
        self.engine.restart()
        return self.engine

    def stand_up(self) -> None:
        """Start again what was killed."""
        if self.engine is not None:
            self.engine.restart()
        if self.killable is not None:
            self.killable.restart()

    def stop(self) -> None:
        """End what the suite started."""
        if self.engine is not None:
            self.engine.kill()
        if self.killable is not None:
            self.killable.kill()


class Scene:
    """A run and the processes that train it, one after the other."""

    def __init__(
        self, run_id: str, course: Course, folder: Path, servers: Servers, faults: Counter[str]
    ) -> None:
        self.run_id = run_id
        self.faults = faults
        self.run_folder = folder / "runs" / run_id
        self._folder = folder
        self._course = course
        self._servers = servers
        self._config = folder / f"{run_id}.yaml"
        self._experiment: dict[str, Any] = {}
        self._flow_run: str | None = None
        self._attempts: list[Attempt] = []

    @classmethod
    @contextmanager
    def set_up(
        cls, run_id: str, course: Course, folder: Path, servers: Servers, way: Way | None
    ) -> Iterator[Scene]:
        """Write the run's experiment; a proxied one has its proxy for the length of the block."""
        with ExitStack() as stack:
            if course.proxied:
                proxy = faulty_proxy(servers.served(folder).url, way)
                url, faults = stack.enter_context(proxy)
                backend = {"kind": "tinker", "params": {"base_url": url}}
            else:
                faults = Counter()
                backend = {"kind": "embedded", "params": {"threads": 1}}
            scene = cls(run_id, course, folder, servers, faults)
            scene._write(backend)
            try:
                yield scene
            finally:
                for attempt in scene._attempts:
                    if not attempt.ended:
                        attempt.kill()

    def _write(self, backend: Mapping[str, Any]) -> None:
        heldout = {
            "name": "heldout",
            "data": {"kind": "jsonl", "path": "examples/data/arithmetic/test.jsonl"},
            "every": 6,
            "max_tokens": 8,
            "limit": 4,
        }
        self._experiment = {
            "name": "chaos",
            "store": str(self._folder / "runs"),
            "model": {"name": MODEL},
            "data": {"kind": "jsonl", "path": "examples/data/arithmetic/train.jsonl"},
            "algorithm": self._course.algorithm,
            "backend": backend,
            "evaluations": [heldout],
        }
        self._config.write_text(yaml.safe_dump(self._experiment))

    @property
    def engine_store(self) -> Path | None:
        """Where a served engine keeps its checkpoints."""
        served = self._servers.engine if self._course.proxied else None
        return served.store if served is not None else None

    @property
    def own_engine(self) -> bool:
        """Whether the run starts its engine itself."""
        return not self._course.proxied

    @property
    def startable_twice(self) -> bool:
        """Whether a second process can be started while one trains; a flow run has but one."""
        return not self._course.deployed

    @property
    def how(self) -> str:
        """What continues it once its process is gone."""
        return "by prefect flow-run retry" if self._course.deployed else "by flowtune run"

    # -- attempts ------------------------------------------------------------------------------

    def start(self) -> Attempt:
        """Begin the run, or continue it."""
        prefect = self._servers.prefect
        if self._course.deployed:
            self._schedule(prefect)
            arguments = ["-m", "prefect", "flow-run", "execute", str(self._flow_run)]
        else:
            arguments = ["-c", FLOWTUNE, "run", str(self._config), f"--run-id={self.run_id}"]
        log = self._folder / f"{self.run_id}-{len(self._attempts) + 1:02d}.log"
        environment = {**prefect.environment, "TINKER_API_KEY": ServedEngine.key}
        attempt = Attempt([sys.executable, *arguments], self.run_id, environment, log)
        self._attempts.append(attempt)
        return attempt

    def _schedule(self, prefect: PrefectServer) -> None:
        """Have Prefect hold a flow run ready to be executed: a new one, or a retry of the last."""
        runs = PrefectRuns(prefect.api_url)
        if self._flow_run is None:
            parameters = {"experiment": self._experiment, "run_id": self.run_id}
            self._flow_run = runs.create(runs.deploy(), parameters)
            return
        runs.bury(self._flow_run)
        retry = [sys.executable, "-m", "prefect", "flow-run", "retry", self._flow_run]
        done = subprocess.run(retry, env=prefect.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def done(self) -> bool:
        """Whether the run has come to its end."""
        result = self.run_folder / "result.json"
        return result.exists() and '"completed"' in result.read_text()

    def await_done(self, attempt: Attempt) -> None:
        """Wait until an attempt has brought the run to its end, or itself has ended."""
        words = f"{attempt.log} is not done"
        wait_until(lambda: attempt.ended or self.done(), ATTEMPT_SECONDS, words)

    def await_end(self, attempt: Attempt) -> None:
        """Wait for an attempt that nobody kills any more."""
        wait_until(lambda: attempt.ended, ATTEMPT_SECONDS, f"{attempt.log} has not ended")

    def await_moment(self, attempt: Attempt, seconds: float, from_opening: bool) -> bool:
        """Wait so long after an attempt's start or opening; False if it or the run ends before."""
        if from_opening:
            words = f"{attempt.log} does not come to its first step"
            wait_until(lambda: attempt.opened or attempt.ended, ATTEMPT_SECONDS, words)
        begun = time.monotonic() if from_opening else attempt.started
        moment = begun + seconds
        words = "the clock stands still"
        wait_until(lambda: attempt.ended or time.monotonic() > moment, seconds + 1, words)
        return not attempt.ended and not self.done()

    # -- kills ---------------------------------------------------------------------------------

    def kill(self, victim: Victim, attempt: Attempt) -> bool:
        """End it at once; False if it is not there any more."""
        engine = None if self._course.proxied else self._engine_of(attempt, victim)
        if attempt.ended:
            return False
        if victim in ("engine", "all"):
            if self._course.proxied and self._servers.engine is not None:
                self._servers.engine.kill()
            elif engine is not None:
                os.kill(engine, signal.SIGKILL)
        if victim in ("prefect", "all") and self._servers.killable is not None:
            self._servers.killable.kill()
        if victim in ("flow", "all"):
            attempt.kill()
        return True

    def _engine_of(self, attempt: Attempt, victim: Victim) -> int | None:
        if victim == "engine":  # at the very start there is none yet
            words = f"{attempt.log} starts no engine"
            wait_until(lambda: attempt.ended or bool(attempt.engine()), ATTEMPT_SECONDS, words)
        return attempt.engine()
