"""The embedded engine: a server that speaks the Tinker protocol."""

from typing import Final

SESSION_SECONDS: Final = 120.0
"""How long a client may show no sign of life until its models are unloaded.

The SDK sends a heartbeat every 10 seconds, and begins to warn when none gets through for so long.
"""
