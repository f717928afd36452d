"""The hub of Hugging Face: its real client against a stand-in that speaks enough of its API.

The client reads its address once, so the data sets are loaded in a process of their own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NOW, BEFORE = "a" * 40, "b" * 40
REVISIONS = {"main": NOW, "v1": BEFORE, NOW: NOW, BEFORE: BEFORE}
CARD = """---
configs:
- config_name: easy
  default: true
  data_files:
  - {split: train, path: easy/train.jsonl}
  - {split: test, path: easy/test.jsonl}
- config_name: hard
  data_files: hard.jsonl
---
"""


def lines(*prompts: str) -> str:
    return "".join(json.dumps({"prompt": prompt, "completion": "x"}) + "\n" for prompt in prompts)


def files(*prompts: str) -> dict[str, bytes]:
    texts = {
        "README.md": CARD,
        "easy/train.jsonl": lines(*prompts),
        "easy/test.jsonl": lines("held out"),
        "hard.jsonl": lines("hard"),
    }
    return {name: text.encode() for name, text in texts.items()}


COMMITS = {NOW: files("one", "two"), BEFORE: files("old")}
URL = re.compile(r"(?:/api)?/datasets/(\w+/\w+)(?:/(\w+)/([^/]+)(?:/(.*))?)?")


class Hub(BaseHTTPRequestHandler):
    """`team/sums` for all, `team/secret` for one token, `team/away` that never answers."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        found = URL.fullmatch(self.path.partition("?")[0])
        if found is None:
            return self._answer(404)
        name, what, revision, path = found.groups()
        if name == "team/away":
            self.close_connection = True
            return None
        if name == "team/secret" and self.headers["authorization"] != "Bearer hf_of_the_team":
            return self._answer(401, x_error_code="RepoNotFound")
        if name == "team/smus":
            return self._answer(404, x_error_code="RepoNotFound")
        commit = REVISIONS.get(revision or "main")
        if commit is None:
            return self._answer(404, x_error_code="RevisionNotFound")
        return self._give(name, what, commit, path or "")

    do_HEAD = do_GET

    def _give(self, name: str, what: str | None, commit: str, path: str) -> None:
        held = COMMITS[commit]
        if what == "tree":
            listed = [
                {"type": "file", "path": one, "size": len(held[one]), "oid": oid(held[one])}
                for one in held
                if one.startswith(path)
            ]
            return self._answer(200, json.dumps(listed).encode())
        if what != "resolve":
            about = {"id": name, "sha": commit, "siblings": [{"rfilename": one} for one in held]}
            return self._answer(200, json.dumps(about).encode())
        if path not in held:
            return self._answer(404, x_error_code="EntryNotFound")
        return self._answer(200, held[path], etag=f'"{oid(held[path])}"', x_repo_commit=commit)

    def _answer(self, status: int, body: bytes = b"{}", **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "content_length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    serving.join()


LOAD = """
import json, sys
from algorithms.data.dataset import load_dataset
from algorithms.data.sources import HuggingFaceData
from backends.errors import UserError
for section in json.load(sys.stdin):
    try:
        print(json.dumps([row["prompt"] for row in load_dataset(HuggingFaceData(**section)).rows]))
    except UserError as error:
        (problem,) = error.problems
        print(json.dumps([problem.where, problem.what, problem.remedy]))
"""


def loaded(sections: list[dict[str, str]], home: Path, **environment: str) -> list[list[str]]:
    """The prompts of each, or the problem that it has: where, what, and remedy."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    run = subprocess.run(
        [sys.executable, "-c", LOAD],
        input=json.dumps(sections),
        env=clean | {"HF_HOME": str(home), "PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [json.loads(line) for line in run.stdout.splitlines()]


SUMS = {"name": "team/sums"}
GOOD: list[tuple[dict[str, str], list[str]]] = [
    (SUMS, ["one", "two"]),
    (SUMS | {"split": "test"}, ["held out"]),
    (SUMS | {"split": "train[:1]"}, ["one"]),
    (SUMS | {"config": "hard"}, ["hard"]),
    (SUMS | {"revision": "v1"}, ["old"]),
    ({"name": "team/secret"}, ["one", "two"]),
]
BAD = [
    (SUMS | {"split": "tset"}, "data.split", "['train', 'test']", "one of its splits"),
    (SUMS | {"config": "hrad"}, "data.config", "['easy', 'hard']", "one that there is"),
    (SUMS | {"revision": "v2"}, "data.revision", "no revision 'v2'", "branch, tag or commit"),
    ({"name": "team/smus"}, "data.name", "no data set 'team/smus'", "HF_TOKEN"),
    ({"name": "team/secret"}, "data.name", "no data set 'team/secret'", "HF_TOKEN"),
    ({"name": "team/away"}, "data.name", "not in the cache, and the hub cannot", "the network"),
]


def test_data_sets_of_the_hub(hub: str, tmp_path: Path) -> None:
    with_token = {"HF_ENDPOINT": hub, "HF_TOKEN": "hf_of_the_team"}
    found = loaded([section for section, _ in GOOD], tmp_path, **with_token)
    assert found == [prompts for _, prompts in GOOD]
    # Without a network it comes out of the cache.
    offline = {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "1"}
    cached, other = loaded([SUMS | {"config": "hard"}, {"name": "team/x"}], tmp_path, **offline)
    assert cached == ["hard"]
    assert "not in the cache, and the hub cannot be reached" in other[1]


def test_what_is_wrong_is_named_at_once(hub: str, tmp_path: Path) -> None:
    found = loaded([section for section, *_ in BAD], tmp_path, HF_ENDPOINT=hub)
    for (where, what, remedy), (_, field, says, do) in zip(found, BAD, strict=True):
        assert where == field
        assert says in what
        assert do in remedy
