"""In which order a run sees its rows: a pure function of how many there are, the seed, the step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def steps_per_epoch(n_rows: int, batch_size: int) -> int:
    """Steps of one pass: every row once, so the last batch of an epoch may be smaller."""
    return -(-n_rows // batch_size)


@lru_cache(maxsize=4)
def epoch_order(n_rows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order of the rows in an epoch (from 0), [n_rows]: a pure function of its arguments.

    Rows are sorted by raw 64-bit draws of PCG64 seeded with (seed, epoch). NumPy promises these
    draws never to change, which it does not promise of `Generator.permutation`.
    """
    import numpy as np

    draws = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n_rows)
    order = np.argsort(draws, kind="stable")
    order.flags.writeable = False
    return order


def batch_rows(n_rows: int, batch_size: int, seed: int, step: int) -> list[int]:
    """The rows of a step (from 0). Steps beyond an epoch go on with the next epoch's order."""
    epoch, index = divmod(step, steps_per_epoch(n_rows, batch_size))
    order = epoch_order(n_rows, seed, epoch)
    picked: list[int] = order[index * batch_size : (index + 1) * batch_size].tolist()
    return picked


class PackedOrder:
    """The same order of rows, in steps of at most so many tokens instead of so many rows.

    A step takes rows until the next one would be too much, so epochs may differ in their steps.
    No row may be longer than `most_tokens`.
    """

    def __init__(self, lengths: Sequence[int], most_tokens: int, seed: int) -> None:
        self._lengths = lengths
        self._most_tokens = most_tokens
        self._seed = seed
        self._epochs: list[list[int]] = []
        """Of each epoch, where in its order each step begins."""
        self._first_steps = [0]

    def steps(self, epochs: int) -> int:
        """The steps of so many epochs."""
        while len(self._epochs) < epochs:
            starts = self._starts(len(self._epochs))
            self._epochs.append(starts)
            self._first_steps.append(self._first_steps[-1] + len(starts))
        return self._first_steps[epochs]

    def cursor(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and which step of it that is (all from 0)."""
        while self._first_steps[-1] <= step:
            self.steps(len(self._epochs) + 1)
        epoch = bisect_right(self._first_steps, step) - 1
        return epoch, step - self._first_steps[epoch]

    def rows(self, step: int) -> list[int]:
        """The rows of a step."""
        epoch, index = self.cursor(step)
        start, *stop = self._epochs[epoch][index : index + 2]
        order = epoch_order(len(self._lengths), self._seed, epoch)
        picked: list[int] = order[start : stop[0] if stop else None].tolist()
        return picked

    def _starts(self, epoch: int) -> list[int]:
        starts, tokens = [0], 0
        for place, row in enumerate(epoch_order(len(self._lengths), self._seed, epoch).tolist()):
            tokens += self._lengths[row]
            if tokens > self._most_tokens:
                starts.append(place)
                tokens = self._lengths[row]
        return starts
