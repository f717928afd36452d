"""The main job as a stranger does it: command line, real server, engine, kill -9, PEFT."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from backends.embedded import EmbeddedParams, EngineProcess
from tests.servers.prefect import PrefectServer

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "examples/sft_arithmetic.yaml"
FLOWTUNE = [sys.executable, "-m", "flows.cli"]


def command(store: Path, run_id: str, *overrides: str) -> list[str]:
    settings = [f"--set={override}" for override in (f"store={store}", *overrides)]
    return [*FLOWTUNE, "run", str(SHIPPED), f"--run-id={run_id}", *settings]


def finish(arguments: list[str], server: PrefectServer) -> str:
    done = subprocess.run(
        arguments, cwd=ROOT, env=server.environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def start(arguments: list[str], server: PrefectServer) -> subprocess.Popen[str]:
    return subprocess.Popen(
        arguments,
        cwd=ROOT,
        env=server.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def untimed(run: Path) -> list[dict[str, Any]]:
    """A run's metrics without what a clock put in."""
    return [
        {name: value for name, value in row.items() if not name.startswith("time/")}
        for row in rows(run / "metrics.jsonl")
    ]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def shipped_run(prefect_server: PrefectServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole run of the shipped example."""
    store = tmp_path_factory.mktemp("store")
    output = finish(command(store, "shipped"), prefect_server)
    assert "shipped" in output
    return store / "shipped"


def test_the_shipped_example_learns(shipped_run: Path) -> None:
    scores = {row["step"]: row["score"] for row in rows(shipped_run / "evaluations.jsonl")}
    assert scores[0] <= 0.10
    assert scores[max(scores)] >= 0.90
    assert max(scores) <= 400
    losses = [row["train_mean_nll"] for row in rows(shipped_run / "metrics.jsonl")]
    assert len(losses) == max(scores)
    assert losses[-1] < 0.1 * losses[0]


def test_no_held_out_row_was_trained_on() -> None:
    experiment = yaml.safe_load(SHIPPED.read_text())
    trained = (ROOT / experiment["data"]["path"]).read_text().splitlines()
    held_out = (ROOT / experiment["evaluations"][0]["data"]["path"]).read_text().splitlines()
    asked = {json.loads(line)["messages"][0]["content"] for line in trained}
    assert not asked & {json.loads(line)["messages"][0]["content"] for line in held_out}


def test_the_adapter_loads_with_peft_and_gives_the_engines_logprobs(shipped_run: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model_folder = ROOT / "examples/models/tiny-qwen3"
    newest = max((shipped_run / "checkpoints").iterdir())
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(newest)).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 17 + 29?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )["input_ids"]
    with torch.no_grad():
        logprobs = model(prompt).logits[0].log_softmax(-1)
    expected = logprobs[:-1].gather(1, prompt[0, 1:, None])[:, 0]

    from backends.engine.records import SampleRequest, SamplingParams
    from backends.engine.torch_backend import TorchBackend

    engine = TorchBackend(str(model_folder))
    engine.load_sampler_checkpoint(newest, "final")
    request = SampleRequest(
        "r", "final", prompt[0].numpy(), 1, SamplingParams(1), prompt_logprobs=True
    )
    answer = engine.sample([request])["r"]
    torch.testing.assert_close(
        torch.from_numpy(answer.prompt_logprobs[1:]), expected, rtol=1e-4, atol=1e-5
    )


def test_the_readme_loads_the_adapter_as_it_says(
    shipped_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(block.replace("runs/<run id>", str(shipped_run)), names)
    assert type(names["model"]).__name__ == "PeftModelForCausalLM"


def test_nothing_is_pickled(shipped_run: Path) -> None:
    suffixes = {path.suffix for path in shipped_run.rglob("*") if path.is_file()}
    assert suffixes <= {".json", ".jsonl", ".md", ".png", ".safetensors", ".yaml"}


SHORT = (
    "algorithm.params.max_steps=24",
    "algorithm.params.save_at_fractions=null",
    "algorithm.params.save_every=4",
    "evaluations=[{name: heldout, every: 6, max_tokens: 16, limit: 20, "
    "data: {kind: jsonl, path: examples/data/arithmetic/test.jsonl}}]",
)


def test_kill_9_then_the_same_command_ends_with_the_same_bits(
    prefect_server: PrefectServer, tmp_path: Path
) -> None:
    finish(command(tmp_path, "whole", *SHORT), prefect_server)
    killed = start(command(tmp_path, "killed", *SHORT), prefect_server)
    manifest = tmp_path / "killed/checkpoints/step-000008/manifest.json"
    wait_for(manifest, killed)
    engine = child_engine(killed.pid)
    killed.kill()
    killed.wait()
    wait_until_gone(engine)
    assert not (tmp_path / "killed/result.json").exists()

    finish(command(tmp_path, "killed", *SHORT), prefect_server)
    last = "checkpoints/step-000024"
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        whole = (tmp_path / "whole" / last / name).read_bytes()
        assert (tmp_path / "killed" / last / name).read_bytes() == whole, name
    evaluated = [(tmp_path / run / "evaluations.jsonl").read_text() for run in ("whole", "killed")]
    assert evaluated[0] == evaluated[1]
    assert [json.loads(line)["step"] for line in evaluated[1].splitlines()] == [0, 6, 12, 18, 24]
    kept = untimed(tmp_path / "killed")
    assert kept == untimed(tmp_path / "whole")
    assert [row["step"] for row in kept] == list(range(1, 25))


@pytest.mark.slow
async def test_a_server_of_ones_own_trains_and_resumes_the_same(
    prefect_server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same run on an engine that outlives it, as on the hosted service: killed and resumed."""
    key = "tml-a-key-of-this-test"
    monkeypatch.setenv("TINKER_API_KEY", key)
    finish(command(tmp_path, "embedded", *SHORT), prefect_server)
    engine = await EngineProcess.start(EmbeddedParams(), "examples/models/tiny-qwen3", key)
    try:
        backend = f"backend={{kind: tinker, params: {{base_url: '{engine.url}'}}}}"
        arguments = command(tmp_path, "served", *SHORT, backend)
        killed = start(arguments, prefect_server)
        wait_for(tmp_path / "served/checkpoints/step-000008/manifest.json", killed)
        killed.kill()
        killed.wait()
        output = finish(arguments, prefect_server)
    finally:
        await engine.stop()
    result = json.loads((tmp_path / "served/result.json").read_text())
    assert result["artifacts"]["sampler"].startswith("tinker://")
    assert result["artifacts"]["sampler"] in output
    assert untimed(tmp_path / "served") == untimed(tmp_path / "embedded")


@pytest.mark.slow
def test_the_same_yaml_on_s3(prefect_server: PrefectServer, s3_uri: str, shipped_run: Path) -> None:
    from backends.storage.run_store import RunStore

    settings = ("algorithm.params.max_steps=4", "algorithm.params.save_at_fractions=null")
    finish(command(Path("runs"), "on-s3", *settings, f"store={s3_uri}"), prefect_server)
    run = RunStore.open_existing(s3_uri, "on-s3")
    assert run.checkpoint_steps() == [4]
    result = run.read_result()
    assert result is not None
    assert result["artifacts"]["checkpoint"] == f"{s3_uri}/on-s3/checkpoints/step-000004"
    # Until the learning rates part, its steps are those of the run in a folder: where a run is
    # kept changes no number.
    local = [row["train_mean_nll"] for row in rows(shipped_run / "metrics.jsonl")[:2]]
    assert [row["train_mean_nll"] for row in run.metrics()[:2]] == local


def test_ctrl_c_ends_the_engine_and_says_how_to_go_on(
    prefect_server: PrefectServer, tmp_path: Path
) -> None:
    running = start(command(tmp_path, "stopped", *SHORT), prefect_server)
    wait_for(tmp_path / "stopped/checkpoints/step-000004/manifest.json", running)
    engine = child_engine(running.pid)
    running.send_signal(signal.SIGINT)
    output, _ = running.communicate(timeout=60)
    assert running.returncode == 130, output
    assert "--run-id stopped" in output
    assert "Traceback" not in output
    wait_until_gone(engine)
    result = json.loads((tmp_path / "stopped/result.json").read_text())
    assert result["status"] == "cancelled"


def wait_for(path: Path, process: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + 180
    while not path.exists():
        assert process.poll() is None, f"the run ended before {path.name} was there"
        assert time.monotonic() < deadline, f"no {path} after three minutes"
        time.sleep(0.02)


def child_engine(pid: int) -> int:
    """The engine that a run started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for child in children:
        if b"backends.engine.server" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise AssertionError(f"process {pid} has no engine")


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError(f"the engine {pid} outlived its run")
