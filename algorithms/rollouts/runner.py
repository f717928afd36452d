"""Many rollouts at once: bounded, each with a time limit and tried again, the same for a seed.

All that is drawn is decided by (experiment seed, batch, group, sample, turn), so that a batch that
is rolled out again is the same to the last bit, also where a rollout is tried again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from algorithms.beside import first_error
from algorithms.data.shapes import Row
from algorithms.rollouts.chat import ChatClient, Opening, Voice
from algorithms.rollouts.environment import Scorer
from algorithms.rollouts.scenes import Outcome, Scene, Stage
from algorithms.rollouts.trajectory import Rollout, Turn, sampled_turn
from backends.base import SamplingClient
from backends.errors import Problem, StateLostError, TransientError, UserError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """How many rollouts at once, and how much each may take."""

    num_samples: int
    n_concurrent: int
    max_turns: int
    max_retries: int
    timeout_seconds: float


@dataclass(slots=True)
class Seat:
    """One rollout to be: whose it is, its row, and how often it was tried again."""

    batch: int
    group: int
    sample: int
    row: Row
    place: str
    chat: ChatClient | None = None
    retries: int = 0

    def __str__(self) -> str:
        turn = self.chat.turn if self.chat is not None else 1
        return f"row {self.place}, sample {self.sample + 1}, turn {turn}"


@dataclass
class RolloutRunner:
    """Rolls out batches; `score_row` gives a row's scorer."""

    stage: Stage
    voice: Voice
    limits: Limits
    seed: int
    score_row: Callable[[Row, str], Scorer]
    where: str = "algorithm.params"
    """What in the document its stage and limits come from."""
    _places: Places = field(init=False)

    def __post_init__(self) -> None:
        self._places = Places(self.limits.n_concurrent)

    async def run(
        self, client: SamplingClient, batch: int, rows: Sequence[tuple[Row, str]]
    ) -> list[list[Rollout]]:
        """`num_samples` rollouts of each row (with its place), row by row.

        Raises the first error: what the client raises, and UserError naming row, turn and cause
        where an environment, an agent or a verifier is at fault, or a logprob is missing.
        """
        samples = range(self.limits.num_samples)
        seats = [
            [Seat(batch, group, sample, row, place) for sample in samples]
            for group, (row, place) in enumerate(rows)
        ]
        return await together(self._group(client, group) for group in seats)

    async def _group(self, client: SamplingClient, seats: list[Seat]) -> list[Rollout]:
        size = min(len(seats), self.limits.n_concurrent)
        parts = [seats[start : start + size] for start in range(0, len(seats), size)]
        done = await together(self._side_by_side(client, part) for part in parts)
        return [rollout for rollouts in done for rollout in rollouts]

    async def _side_by_side(self, client: SamplingClient, seats: list[Seat]) -> list[Rollout]:
        """Rollouts of one row; those that begin alike get their first turns in one request."""
        async with self._places.taken(len(seats)):
            scenes = await together(self._tried(seat, partial(self._open, seat)) for seat in seats)
            firsts = await self._first_turns(client, seats, scenes)
            return await together(
                self._rollout(client, seat, scene, first)
                for seat, scene, first in zip(seats, scenes, firsts, strict=True)
            )

    async def _open(self, seat: Seat) -> Scene:
        seed = seed_of(self.seed, seat.batch, seat.group, seat.sample, 0)
        return await self.stage.open(seat.row, seed, self.score_row(seat.row, seat.place))

    async def _first_turns(
        self, client: SamplingClient, seats: list[Seat], scenes: list[Scene]
    ) -> list[tuple[Opening, Turn] | None]:
        """For each scene its opening and first turn; None for those that do not say it."""
        openings: list[Opening] = []
        members: list[list[int]] = []
        for index, scene in enumerate(scenes):
            if scene.opening is None:
                continue
            known = [(opening.messages, opening.tools) for opening in openings]
            if scene.opening not in known:
                seat = seats[index]
                openings.append(self.voice.of(seat.row).opening(*scene.opening, seat.place))
                members.append([])
                known.append(scene.opening)
            members[known.index(scene.opening)].append(index)
        drawn = await together(
            self._draw(client, opening.prompt.tokens, [seats[index] for index in indices])
            for opening, indices in zip(openings, members, strict=True)
        )
        firsts: list[tuple[Opening, Turn] | None] = [None] * len(scenes)
        for opening, indices, turns in zip(openings, members, drawn, strict=True):
            for index, turn in zip(indices, turns, strict=True):
                firsts[index] = opening, turn
        return firsts

    async def _draw(
        self, client: SamplingClient, prompt: list[int], seats: list[Seat]
    ) -> list[Turn]:
        from tinker import types as tinker_types

        params = self.voice.params(self._seed_of_turn(seats[0], 0))
        model_input = tinker_types.ModelInput.from_ints(prompt)
        turns: list[Turn] = []
        try:
            answer = await client.sample(model_input, len(seats), params)
            for sequence in answer.sequences[: len(seats)]:
                turns.append(sampled_turn(prompt, sequence))
        except UserError as error:
            raise _of(error, str(seats[len(turns)])) from error
        return turns

    async def _rollout(
        self, client: SamplingClient, seat: Seat, scene: Scene, first: tuple[Opening, Turn] | None
    ) -> Rollout:
        scenes = [scene]  # one is played once; trying again takes a new one

        async def play() -> Outcome:
            current = scenes.pop() if scenes else await self._open(seat)
            seat.chat = ChatClient(
                client,
                self.voice.of(seat.row),
                seat.place,
                self.limits.max_turns,
                partial(self._seed_of_turn, seat),
            )
            if first is not None:
                seat.chat.expect(*first)
            outcome = await current.play(seat.chat)
            if not math.isfinite(outcome.reward):
                raise ValueError(f"the reward is {outcome.reward}, not a finite number")
            return outcome

        outcome = await self._tried(seat, play)
        assert seat.chat is not None
        return Rollout(
            seat.group,
            seat.chat.turns,
            outcome.messages,
            outcome.reward,
            outcome.end,
            outcome.metrics,
            seat.retries,
        )

    def _seed_of_turn(self, seat: Seat, turn: int) -> int:
        """Turns count from 0; -1 is what the environment or agent itself may draw from."""
        return seed_of(self.seed, seat.batch, seat.group, seat.sample, turn + 1)

    async def _tried(self, seat: Seat, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What comes of work, tried again until the rollout's max_retries are used up."""
        while True:
            try:
                async with asyncio.timeout(self.limits.timeout_seconds) as timer:
                    return await work()
            except (StateLostError, TransientError):
                raise
            except Exception as error:
                if seat.chat is not None and seat.chat.failed is not None:
                    raise _sampling_failed(seat, seat.chat.failed) from error
                if seat.retries == self.limits.max_retries:
                    raise self._gave_up(seat, error, timer.expired()) from error
                seat.retries += 1

    def _gave_up(self, seat: Seat, error: Exception, late: bool) -> UserError:
        tries = f"; tried {seat.retries + 1} times" if seat.retries else ""
        if isinstance(error, UserError):
            return _of(error, f"{seat}{tries}")
        if late:
            seconds = self.limits.timeout_seconds
            return UserError(
                Problem(
                    f"{self.where}.rollout_timeout_seconds",
                    f"a rollout was not over after {seconds:g} seconds ({seat}{tries})",
                    f"raise it, or see what keeps {self.stage.name} waiting",
                )
            )
        return UserError(
            Problem(
                f"{self.where}.{self.stage.parameter}",
                f"{self.stage.name} raised {type(error).__name__}: {error} ({seat}{tries})",
                "mend it, or the row",
            )
        )


def _sampling_failed(seat: Seat, error: Exception) -> Exception:
    return _of(error, str(seat)) if isinstance(error, UserError) else error


def _of(error: UserError, whose: str) -> UserError:
    """A mistake with the rollout that it was found in."""
    return UserError(*(Problem(p.where, f"{p.what} ({whose})", p.remedy) for p in error.problems))


class Places:
    """Room for so many rollouts at once."""

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)
        self._door = asyncio.Lock()

    @asynccontextmanager
    async def taken(self, count: int) -> AsyncIterator[None]:
        """So many places for the length of the block; who comes first gets all of them first."""
        held = 0
        try:
            async with self._door:
                for _ in range(count):
                    await self._free.acquire()
                    held += 1
            yield
        finally:
            for _ in range(held):
                self._free.release()


async def together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order; the first error ends the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as errors:
        first = first_error(errors)
        raise first from first.__cause__
    return [task.result() for task in tasks]


def seed_of(*path: int) -> int:
    """A seed in [0, 2^31) that a path of numbers decides, e.g. (seed, batch, group, sample, turn).

    NumPy promises the words of SeedSequence never to change.
    """
    import numpy as np

    word: int = np.random.SeedSequence(path).generate_state(1).tolist()[0]
    return word >> 1
