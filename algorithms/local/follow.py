"""One of the other processes of a run: `python -m algorithms.local.follow FOLDER RANK`.

It takes the steps of the run that FOLDER tells of, with its part of every batch, and keeps nothing.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from algorithms.base import RunContext
from algorithms.data.dataset import load_dataset
from algorithms.experiment import Experiment, parse_experiment
from algorithms.local.algorithm import LocalAlgorithm
from algorithms.local.processes import Follower, Told, joined, write_problems
from backends.base import SavedState
from backends.child import Announcer, leave, when_parent_ends
from backends.errors import Problem, UserError
from backends.local import LocalBackend, LocalParams, open_local


async def follow(folder: Path, rank: int, announce: Announcer) -> None:
    """Take part in every step that is left. Raises UserError for what keeps it from that."""
    told = Told.read(folder)
    experiment = parse_experiment(told.experiment)
    algorithm = experiment.algorithm.build()
    assert isinstance(algorithm, LocalAlgorithm)
    context, backend = await asyncio.to_thread(_opened, told, experiment, folder, rank)
    try:
        await algorithm.setup(context, backend)
        announce(event="ready")
        events = asyncio.get_running_loop()
        loop = Follower(told.first_step, algorithm.total_steps, events)
        await asyncio.to_thread(_take_steps, algorithm, loop, folder, backend)
    finally:
        await backend.aclose()


def _opened(
    told: Told, experiment: Experiment, folder: Path, rank: int
) -> tuple[RunContext, LocalBackend]:
    """The rows and the model, as the leader has them."""
    dataset = load_dataset(experiment.data, "data", experiment.algorithm.build().check_row)
    if dataset.fingerprint != told.data_fingerprint:
        what = "the rows are not those that the run's own process has read"
        raise UserError(Problem("data", what, "leave the files alone, and start the run again"))
    params = experiment.backend.params
    assert isinstance(params, LocalParams)
    backend = open_local(params, experiment.model_spec(), SavedState(None, folder), rank)
    tokenizer = backend.get_tokenizer()
    context = RunContext(told.run_id, told.run_uri, experiment, dataset, backend, tokenizer)
    return context, backend


def _take_steps(
    algorithm: LocalAlgorithm, loop: Follower, folder: Path, backend: LocalBackend
) -> None:
    with joined(folder, backend):
        algorithm.take_steps(loop)


def _abandon(folder: Path) -> None:
    """The leader is gone: clean up for it, and go; a collective operation cannot be told to."""
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def main(arguments: Sequence[str]) -> int:
    """Follow; returns the exit code: 0 at the end of the steps, 2 for a user's mistake."""
    folder, rank = Path(arguments[0]), int(arguments[1])
    announce = Announcer(wanted=True)
    when_parent_ends(partial(_abandon, folder))
    try:
        asyncio.run(follow(folder, rank, announce))
    except UserError as error:
        write_problems(folder, rank, error.problems)
        return 2
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
