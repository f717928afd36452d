"""Servers that tests ask for by name; each is real, started once, and stopped at the end."""

from tests.servers.prefect import prefect_server
from tests.servers.swift import aws, s3, s3_uri

__all__ = ["aws", "prefect_server", "s3", "s3_uri"]
