"""Kills by turns, at random moments, until there were enough; every run is compared at its end.

A run is disturbed until it is done: each of its processes is killed at a moment that the seed
decides, and goes on by itself, by `flowtune run --run-id` or by `prefect flow-run retry`. The seed
fixes what is done and when; what the machine does in that moment it cannot fix.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Final

from tests.chaos.compare import differences
from tests.chaos.processes import Attempt, Stuck, wait_until
from tests.chaos.scene import LOG_LINES_SHOWN, VICTIMS, Course, Scene, Servers, Victim
from tests.servers.faults import WAYS

DURING_START: Final = 0.2
"""How many of the kills fall before the first step."""
MOST_ATTEMPTS: Final = 25
LOST: Final = "has taken it over"
"""What a process says that another one has the run of."""
DOWN_SECONDS: Final = 2.0
"""The longest that what was killed stays down, when it does not belong to the run."""
LONG_DOWN_SECONDS: Final = 30.0
LONG_DOWN: Final = 0.25
"""How often Prefect stays away for as long as that, as in an upgrade of its server."""


@dataclass
class Tally:
    """What was done to the runs, and what came of it."""

    kills: Counter[Victim] = field(default_factory=Counter)
    runs: int = 0
    rivals: int = 0
    faults: int = 0
    went_on: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        def listed(counts: Counter[str] | Counter[Victim]) -> str:
            return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"

        return (
            f"{self.kills.total()} kills ({listed(self.kills)}), {self.rivals} second processes, "
            f"{self.faults} faults in {self.runs} runs, which went on ({listed(self.went_on)}); "
            f"{len(self.wrong)} things went wrong"
        )


@dataclass(frozen=True)
class Whole:
    """A run that nothing happened to, and how long it took to start and to train (s)."""

    folder: Path
    start_seconds: float
    train_seconds: float


class Campaign:
    """Disturbed runs below one folder; `tell` is given a line for everything that happens.

    `twice` is how often a process gets a second one beside it on the same run, from 0 to 1.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        servers: Servers,
        tell: Callable[[str], None] = print,
        victims: Sequence[Victim] = VICTIMS,
        twice: float = 0.0,
    ) -> None:
        self.tally = Tally()
        self.folder = folder
        self._servers = servers
        self._tell = tell
        self._chance = random.Random(seed)
        self._whole: dict[str, Whole] = {}
        self._victims = cycle(victims)
        self._twice = twice
        folder.mkdir(parents=True, exist_ok=True)

    def disturb(self, course: Course, most_kills: int) -> None:
        """Train one run, kill about it at most so many times on the way, and compare it."""
        whole = self._undisturbed(course)
        self.tally.runs += 1
        run_id = f"{course.name}-{self.tally.runs:03d}"
        way = self._chance.choice(WAYS) if course.proxied else None
        self._tell(f"{run_id}" + (f" over a proxy: {way}" if way else ""))
        with Scene.set_up(run_id, course, self.folder, self._servers, way) as scene:
            try:
                if self._train(scene, whole, most_kills):
                    for found in differences(whole.folder, scene.run_folder, scene.engine_store):
                        self._complain(run_id, found)
            except Stuck as stuck:
                self._complain(run_id, str(stuck))
            self.tally.faults += scene.faults.total()

    def _undisturbed(self, course: Course) -> Whole:
        if course.name not in self._whole:
            run_id = f"{course.name}-whole"
            with Scene.set_up(run_id, course, self.folder, self._servers, None) as scene:
                attempt = scene.start()
                scene.await_moment(attempt, 0, from_opening=True)
                opened = time.monotonic()
                scene.await_done(attempt)
                done = time.monotonic()
                scene.await_end(attempt)
            assert scene.done(), attempt.words()
            times = opened - attempt.started, done - opened
            self._whole[course.name] = Whole(scene.run_folder, *times)
        return self._whole[course.name]

    def _train(self, scene: Scene, whole: Whole, most_kills: int) -> bool:
        """Attempts until the run is done; False if one of them fails for no reason."""
        attempt = scene.start()
        for _ in range(MOST_ATTEMPTS):
            if scene.startable_twice and self._chance.random() < self._twice:
                attempt = self._start_another(scene, attempt, whole)
            killed = self._kill(scene, attempt, whole, most_kills)
            most_kills -= len(killed)
            scene.await_end(attempt)
            self._servers.stand_up()
            if scene.done():
                self.tally.went_on["by itself"] += len(killed)
                return True
            # A run recovers from the loss of its engine without leaving its process; one that is
            # only about to be opened says that a server is not there.
            if not killed or (set(killed) == {"engine"} and (attempt.opened or scene.own_engine)):
                cause = f"{len(killed)} kills of the engine" if killed else "nothing"
                self._complain(scene.run_id, f"the process ended after {cause}:\n{_last(attempt)}")
                return False
            self._tell(f"    ended after {killed[-1]}; on {scene.how}")
            self.tally.went_on[scene.how] += 1
            self.tally.went_on["by itself"] += len(killed) - 1
            attempt = scene.start()
        self._complain(scene.run_id, f"not done after {MOST_ATTEMPTS} attempts")
        return False

    def _start_another(self, scene: Scene, attempt: Attempt, whole: Whole) -> Attempt:
        """A second process on the run while the first one trains: the first has to give way."""
        # So much later it opens the run while the first one is in the midst of its steps.
        later = self._chance.uniform(0, whole.train_seconds)
        if not scene.await_moment(attempt, later, from_opening=False):
            return attempt
        other = scene.start()
        self._tell(f"    {time.monotonic() - attempt.started:5.1f} s: started a second time")
        self.tally.rivals += 1
        scene.await_end(attempt)
        if not scene.done() and LOST not in attempt.words():
            self._complain(scene.run_id, f"the first process ended otherwise:\n{_last(attempt)}")
        return other

    def _kill(self, scene: Scene, attempt: Attempt, whole: Whole, most: int) -> list[Victim]:
        """Kill about an attempt until it ends, or at most so often; returns what was killed."""
        killed: list[Victim] = []
        while len(killed) < most:
            from_opening = bool(killed) or self._chance.random() > DURING_START
            longest = whole.train_seconds if from_opening else whole.start_seconds
            longest /= 1 + len(killed)
            moment = self._chance.uniform(0, longest)
            if not scene.await_moment(attempt, moment, from_opening):
                break
            victim = next(self._victims)
            if not scene.kill(victim, attempt):
                break
            killed.append(victim)
            self.tally.kills[victim] += 1
            self._tell(f"    {time.monotonic() - attempt.started:5.1f} s: kill -9 {victim}")
            if victim in ("flow", "all"):
                break
            self._stay_down(victim, attempt)
            self._servers.stand_up()
        return killed

    def _stay_down(self, victim: Victim, attempt: Attempt) -> None:
        seconds = self._chance.uniform(0, DOWN_SECONDS)
        if victim == "prefect" and self._chance.random() < LONG_DOWN:
            seconds = LONG_DOWN_SECONDS
            self._tell(f"            which stays away for {seconds:.0f} s")
        until = time.monotonic() + seconds
        wait_until(
            lambda: attempt.ended or time.monotonic() > until, seconds + 1, "the clock stands still"
        )

    def _complain(self, run_id: str, words: str) -> None:
        self._tell(f"    WRONG: {words}")
        self.tally.wrong.append(f"{run_id}: {words}")


def _last(attempt: Attempt) -> str:
    return "\n".join(attempt.words().splitlines()[-LOG_LINES_SHOWN:])
