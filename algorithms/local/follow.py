"""One of the other processes of a run: `python -m algorithms.local.follow FOLDER RANK`.

It takes the steps of the run that FOLDER tells of, with its part of every batch, and keeps nothing.
"""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from algorithms.base import RunContext
from algorithms.data.dataset import load_dataset
from algorithms.experiment import parse_experiment
from algorithms.local.algorithm import LocalAlgorithm
from algorithms.local.processes import Follower, Told, joined, write_problems
from backends.base import SavedState
from backends.child import Announcer, leave, when_parent_ends
from backends.errors import Problem, UserError
from backends.local import LocalParams, open_local


async def follow(folder: Path, rank: int, announce: Announcer) -> None:
    """Take part in every step that is left. Raises UserError for what keeps it from that."""
    told = Told.read(folder)
    experiment = parse_experiment(told.experiment)
    algorithm = experiment.algorithm.build()
    assert isinstance(algorithm, LocalAlgorithm)
    dataset = await asyncio.to_thread(load_dataset, experiment.data, "data", algorithm.check_row)
    if dataset.fingerprint != told.data_fingerprint:
        what = "the rows are not those that the run's own process has read"
        raise UserError(Problem("data", what, "leave the files alone, and start the run again"))
    params = experiment.backend.params
    assert isinstance(params, LocalParams)
    start = SavedState(None, folder)
    backend = await asyncio.to_thread(open_local, params, experiment.model_spec(), start, rank)
    tokenizer = backend.get_tokenizer()
    context = RunContext(told.run_id, told.output_dir, experiment, dataset, backend, tokenizer)
    try:
        await algorithm.setup(context, backend)
        announce(event="ready")
        events = asyncio.get_running_loop()

        def take_steps() -> None:
            with joined(folder, backend) as words:
                steps = (told.first_step, algorithm.total_steps)
                algorithm.take_steps(Follower(*steps, events, words))

        await asyncio.to_thread(take_steps)
    finally:
        await backend.aclose()


def _abandon(folder: Path) -> None:
    """The leader is gone: become what cleans up after it; other threads cannot be told to end."""
    clean_up = "import shutil, sys; shutil.rmtree(sys.argv[1], ignore_errors=True)"
    os.execv(sys.executable, [sys.executable, "-c", clean_up, str(folder)])


def main(arguments: Sequence[str]) -> int:
    """Follow; returns the exit code: 0 at the end of the steps, 2 for a user's mistake, 1 else."""
    folder, rank = Path(arguments[0]), int(arguments[1])
    announce = Announcer(wanted=True)
    when_parent_ends(partial(_abandon, folder))
    try:
        asyncio.run(follow(folder, rank, announce))
    except UserError as error:
        write_problems(folder, rank, error.problems)
        return 2
    except Exception:  # noqa: BLE001  (the leader reads it, and waits no longer than it has to)
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
