"""Servers that tests ask for by name; each is real, started once, and stopped at the end."""

from tests.servers.prefect import prefect_server

__all__ = ["prefect_server"]
