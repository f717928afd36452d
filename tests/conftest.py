"""Servers that tests ask for by name; each is real, started once, and stopped at the end."""

import os

import pytest

from tests.servers.prefect import prefect_server
from tests.servers.swift import aws, s3, s3_uri

__all__ = ["aws", "prefect_server", "s3", "s3_uri"]


@pytest.fixture(scope="session", autouse=True)
def _trackers_keep_to_the_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Trackio's folder is decided when it is first imported, by whichever test that is."""
    os.environ["TRACKIO_DIR"] = str(tmp_path_factory.mktemp("trackio"))
