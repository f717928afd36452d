"""The random numbers of a step: what a run saves of them, and what it decides anew at each step.

torch's generators are the trainer's alone, so where they stand is part of a checkpoint. From those
of Python and NumPy everything else in the process draws too, so nothing is kept of them: each step
begins with a state of its own.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np


def seed_step(seed: int, step_idx: int, rank: int) -> None:
    """Put Python's and NumPy's generators where a step (from 0) of one process begins."""
    draws = random.Random(f"{seed}/{step_idx}/{rank}")
    np.random.seed(draws.getrandbits(32))
    random.setstate(draws.getstate())


def random_state() -> dict[str, Any]:
    """Where torch's generators of this process stand."""
    import torch

    state: dict[str, Any] = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()  # of the one GPU that is this process's
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put them where `random_state` found them."""
    import torch

    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])
