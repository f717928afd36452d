"""The stores that a test of the contract runs on: a folder, memory, and a real S3 service."""

import uuid
from pathlib import Path

import pytest


@pytest.fixture(params=["folder", "memory", "s3"])
def store_uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty store of each kind."""
    if request.param == "s3":
        uri: str = request.getfixturevalue("s3_uri")
        return uri
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}"
    return str(tmp_path / "store")
