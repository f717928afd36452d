"""Supervised fine-tuning without compute: the real recipe on a backend that only pretends."""

from __future__ import annotations

from typing import ClassVar

from algorithms.sft import SFT


class MockSFT(SFT):
    """SFT on the mock backend: a deterministic loss curve and real checkpoints, no model."""

    name: ClassVar[str] = "mock_sft"
    default_backend: ClassVar[str] = "mock"
