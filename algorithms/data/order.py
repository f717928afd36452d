"""In which order a run sees its rows: a pure function of how many there are, the seed, the step."""

from __future__ import annotations

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
