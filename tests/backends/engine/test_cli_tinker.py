"""The `tinker` command line, as it is installed, against an engine in a process of its own.

An interpreter takes two seconds to load it: one process runs the commands one after another, each
by the entry point itself; a few are run by the installed script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from backend_contract import CONTEXT, write_base_model
from engine_process import KEY, ROOT, EngineProcess, engine
from peft import PeftModel
from tinker import types
from transformers import AutoModelForCausalLM

RUNNER = """
import contextlib, io, json, sys
from tinker.cli.__main__ import main
answers = sys.stdout
for line in sys.stdin:
    sys.argv = ["tinker", *json.loads(line)]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
    print(json.dumps([code, out.getvalue(), err.getvalue()]), file=answers, flush=True)
"""

Cli = Callable[..., str]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def running(home: Path) -> Iterator[EngineProcess]:
    base = write_base_model(home / "base")
    with engine(base, home / "store", log=home / "log") as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def environment(running: EngineProcess, home: Path) -> dict[str, str]:
    """What someone sets to use the engine in place of the hosted service; no other key is found."""
    given = {"TINKER_BASE_URL": running.url, "TINKER_API_KEY": KEY, "HOME": str(home)}
    return os.environ | given | {"HF_HUB_OFFLINE": "1", "COLUMNS": "300", "NO_COLOR": "1"}


@pytest.fixture(scope="module")
def cli(environment: dict[str, str], home: Path) -> Iterator[Cli]:
    """Runs a command; its output, or with `fails` its errors."""
    runner = subprocess.Popen(
        [sys.executable, "-c", RUNNER],
        env=environment,
        cwd=home,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert runner.stdin is not None
    assert runner.stdout is not None

    def run(*arguments: str, fails: bool = False) -> str:
        assert runner.stdin is not None
        assert runner.stdout is not None
        print(json.dumps(arguments), file=runner.stdin, flush=True)
        code, out, err = json.loads(runner.stdout.readline())
        assert (code != 0) == fails, (code, out, err)
        return str(err if fails else out)

    yield run
    runner.stdin.close()
    assert runner.wait(20) == 0
    runner.stdout.close()


@pytest.fixture(scope="module")
def client(running: EngineProcess, home: Path) -> Iterator[tinker.TrainingClient]:
    """A client that has trained a step."""
    with tinker.ServiceClient(base_url=running.url, api_key=KEY) as service:
        client = service.create_lora_training_client(
            str(home / "base"), rank=3, seed=0, user_metadata={"purpose": "cli"}
        ).result()
        inputs: dict[str, Any] = {"target_tokens": np.array([6, 7, 8])}
        prompt = types.ModelInput.from_ints([5, 6, 7])
        datum = types.Datum(model_input=prompt, loss_fn_inputs=inputs)
        client.forward_backward([datum], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        yield client


def as_json(text: str) -> Any:
    return json.loads(text)


def test_the_installed_script(environment: dict[str, str], client: tinker.TrainingClient) -> None:
    script = Path(sys.executable).with_name("tinker")

    def run(*arguments: str) -> str:
        return subprocess.run(
            [script, *arguments], env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert run("version") == f"tinker {tinker.__version__}\n"
    assert client.model_id in run("run", "list")


def test_models(cli: Cli, home: Path) -> None:
    shown = cli("model", "list")
    assert str(home / "base") in shown
    assert str(CONTEXT) in shown
    (model,) = as_json(cli("-f", "json", "model", "list", "BASE"))["models"]
    assert (model["trainable"], model["max_context_length"]) == (True, CONTEXT)


def test_runs(cli: Cli, client: tinker.TrainingClient, home: Path) -> None:
    path = client.save_state("for-runs").result().path
    columns = "id,model,owner,lora,updated,status,checkpoint,checkpoint_time"
    shown = cli("run", "list", "--columns", columns, "--limit", "0")
    for part in (client.model_id, str(home / "base"), "Rank 3", "OK", "weights/for-runs"):
        assert part in shown
    runs = as_json(cli("-f", "json", "run", "list"))["runs"]
    assert client.model_id in [run["training_run_id"] for run in runs]
    shown = cli("run", "info", client.model_id)
    for part in (client.model_id, "Yes (Rank 3)", "OK", path, "purpose", "cli"):
        assert part in shown
    assert "there is no training run nobody" in cli("run", "info", "nobody", fails=True)


def test_checkpoints(cli: Cli, client: tinker.TrainingClient) -> None:
    path = client.save_state("x", ttl_seconds=7200).result().path
    sampler = client.save_weights_for_sampler("y").result().path
    for arguments in (("--run-id", client.model_id), (), ("--limit", "0")):
        shown = cli("checkpoint", "list", *arguments)
        for part in (path, "training", sampler, "sampler", "Never", "kB"):
            assert part.lower() in shown.lower(), shown
    shown = cli("checkpoint", "info", path)
    for part in ("weights/x", client.model_id, "Yes (Rank 3)"):
        assert part in shown
    told = as_json(cli("-f", "json", "checkpoint", "info", sampler))
    assert (told["tinker_path"], told["public"], told["lora_rank"]) == (sampler, False, 3)
    assert "not found" in cli("checkpoint", "info", path + "y", fails=True)


def test_flags(cli: Cli, client: tinker.TrainingClient) -> None:
    path = client.save_state("flags").result().path

    def told() -> tuple[bool, bool]:
        document = as_json(cli("-f", "json", "checkpoint", "info", path))
        return document["public"], document["expires_at"] is not None

    assert told() == (False, False)
    for arguments, expected in (
        (("publish", path), (True, False)),
        (("set-ttl", path, "--ttl", "7200"), (True, True)),
        (("unpublish", path), (False, True)),
        (("set-ttl", path, "--remove"), (False, False)),
    ):
        cli("checkpoint", *arguments)
        assert told() == expected
    said = cli("checkpoint", "set-ttl", path, "--ttl", "60", fails=True)
    assert "ttl_seconds: Input should be greater than or equal to 3600" in said
    assert "there is no checkpoint" in cli("checkpoint", "publish", path + "y", fails=True)


def test_deleting(cli: Cli, client: tinker.TrainingClient) -> None:
    paths = [client.save_state(f"old-{number}").result().path for number in range(3)]
    kept = client.save_weights_for_sampler("kept").result().path
    assert "Deleted 2 checkpoint(s)" in cli("checkpoint", "delete", *paths[:2], "--yes")
    arguments = ("--run-id", client.model_id, "--type", "weights", "--yes")
    told = as_json(cli("-f", "json", "checkpoint", "delete", *arguments))
    assert (told["deleted_count"] > 0, told["failed"]) == (True, [])
    shown = cli("checkpoint", "list", "--run-id", client.model_id)
    assert kept in shown
    assert "/weights/" not in shown
    assert "Failed to delete 1" in cli("checkpoint", "delete", paths[0], "--yes")


def test_downloading(cli: Cli, client: tinker.TrainingClient, home: Path) -> None:
    """What comes is a PEFT adapter that plain transformers take; nothing is left on the server."""
    path = client.save_state("final").result().path
    shown = cli("checkpoint", "download", path, "--output", "models")
    folder = home / "models" / path.removeprefix("tinker://").replace("/", "_")
    assert str(folder.relative_to(home)) in shown
    assert {file.name for file in folder.iterdir()} == {
        "adapter_model.safetensors",
        "adapter_config.json",
    }
    saved = home / "store" / client.model_id.replace(":", "_") / "weights" / "final"
    for file in folder.iterdir():
        assert file.read_bytes() == (saved / file.name).read_bytes()
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(home / "base"), folder)
    assert model.peft_config["default"].r == 3
    assert "external_weights" not in cli("checkpoint", "list", "--limit", "0")
    assert "already exists" in cli("checkpoint", "download", path, "-o", "models", fails=True)
    cli("checkpoint", "download", path, "-o", "models", "--force")
    external = client.save_weights_external("out").result().path
    cli("checkpoint", "download", external)
    assert (home / external.removeprefix("tinker://").replace("/", "_")).is_dir()
    missing = cli("checkpoint", "download", path + "y", fails=True)
    assert "there is no checkpoint" in missing
    assert "Not logged in" in cli("checkpoint", "push-hf", path, fails=True)


def test_the_commands_on_the_page(cli: Cli, client: tinker.TrainingClient) -> None:
    path = client.save_state("first").result().path
    page = (ROOT / "docs" / "engine.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("tinker ")]
    assert len(lines) >= 8
    for line in lines:
        said = cli(*line.replace("RUN", client.model_id).split()[1:])
        assert "Failed" not in said
    assert path not in cli("checkpoint", "list", "--limit", "0")


def test_what_it_does_not_have(cli: Cli) -> None:
    said = cli("session", "export-trace", "some-session", fails=True)
    assert "this engine has no traces of sessions" in said
    said = cli("billing", "checkpoint-storage", fails=True)
    assert "this engine has no billing" in said
