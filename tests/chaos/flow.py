"""The train flow in a process that also knows the on-policy algorithm of the test suite."""

import tests.algorithms.sampling_algorithm  # noqa: F401 - registers it
from flows.train import train

__all__ = ["train"]
