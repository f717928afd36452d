"""The command line as a person meets it: real processes, their words and exit codes."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from backends.storage.run_store import RunStore
from tests.servers.prefect import PrefectServer

COMMANDS = ["run", "validate", "suggest", "list", "schema", "engine", "runs"]
HEAVY = ["torch", "transformers", "prefect", "tinker", "fsspec", "numpy", "matplotlib"]
ROWS = [{"prompt": f"What is {i} + {i}?", "completion": str(2 * i)} for i in range(20)]
FLOWTUNE = [str(Path(sys.executable).parent / "flowtune")]

BROKEN = """
import sys
from algorithms.mock_sft import MockSFT
from algorithms.registry import register_algorithm

@register_algorithm("broken_sft")
class BrokenSFT(MockSFT):
    async def build_batch(self, step_idx):
        if step_idx == 5:
            raise RuntimeError("the disk is on fire")
        return await super().build_batch(step_idx)

from flows.cli import main
main()
"""


def document(store: Path, **changes: Any) -> dict[str, Any]:
    known: dict[str, Any] = {
        "name": "cli",
        "store": str(store),
        "model": {"name": "none"},
        "data": {"kind": "rows", "rows": ROWS},
        "algorithm": {
            "kind": "mock_sft",
            "params": {"batch_size": 4, "max_steps": 8, "save_every": 4},
        },
        "evaluations": [{"name": "val", "data": {"kind": "rows", "rows": ROWS}}],
    }
    return known | changes


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(document(tmp_path / "runs")))
    return path


@pytest.fixture
def nowhere(tmp_path: Path) -> dict[str, str]:
    """An environment whose Prefect server does not exist: whoever asks for one fails."""
    return {
        **os.environ,
        "PREFECT_API_URL": "http://127.0.0.1:9/api",
        "PREFECT_HOME": str(tmp_path / "home"),
    }


def flowtune(
    *arguments: object, env: dict[str, str], command: list[str] = FLOWTUNE
) -> subprocess.CompletedProcess[str]:
    line = [*command, *map(str, arguments)]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert "Traceback" not in done.stdout + done.stderr
    return done


# --- quick to answer


def test_help_of_every_command_answers_at_once_and_imports_nothing_heavy() -> None:
    ask = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "import flows.cli\n"
        f"for command in [[]] + [[c] for c in {COMMANDS}]:\n"
        "    done = CliRunner().invoke(flows.cli.app, [*command, '--help'])\n"
        "    assert done.exit_code == 0, done.output\n"
        f"print([name for name in {HEAVY} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_takes_less_than_a_second_of_computing() -> None:
    spent = []
    for _ in range(3):  # the best of three: the machine may be busy with something else
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*FLOWTUNE, "--help"], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(spent) < 1.0


def test_checking_an_experiment_imports_no_compute_library(config: Path) -> None:
    ask = (
        "import sys\n"
        "from algorithms.check import check_experiment\n"
        f"assert check_experiment({str(config)!r})[1] == []\n"
        "print([name for name in ('torch', 'transformers', 'prefect') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- run


def test_a_run_is_shown_from_the_first_step_to_the_closing_table(
    prefect_server: PrefectServer, config: Path, nowhere: dict[str, str], tmp_path: Path
) -> None:
    env = prefect_server.environment
    done = flowtune("run", config, "--run-id", "a", env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert "run a: 8 steps" in lines
    assert any(line.startswith("  step 8/8  loss ") and "tokens/s" in line for line in lines)
    # The mock says nothing untrained and repeats the question afterwards: right neither time.
    closing = dict(line.split(maxsplit=1) for line in lines if line[:8] in ("val     ", "adapter "))
    assert closing["val"] == "0.000 → 0.000"
    assert closing["adapter"] == str(tmp_path / "runs/a/checkpoints/step-000008")
    link = next(line for line in lines if line.startswith("in Prefect"))
    page = f"{prefect_server.api_url.removesuffix('/api')}/v2/runs/flow-run/"
    assert page in link
    assert len(link.split(page)[1]) == 36

    assert "INFO" not in done.stdout

    # A finished run is shown again without anything being started.
    again = flowtune("run", config, "--run-id", "a", env=nowhere)
    assert again.returncode == 0
    assert "run a is finished already; this is its result" in again.stdout
    assert "0.000 → 0.000" in again.stdout


def test_a_run_that_fails_says_why_and_how_to_go_on(
    prefect_server: PrefectServer, config: Path, tmp_path: Path
) -> None:
    env = {**prefect_server.environment, "PREFECT_HOME": str(tmp_path / "home")}
    kind = ("--set", "algorithm.kind=broken_sft")
    command = [sys.executable, "-c", BROKEN]
    done = flowtune("run", config, "--run-id", "b", *kind, env=env, command=command)
    assert done.returncode == 1
    first, hint, where = done.stderr.splitlines()
    raised = "BrokenSFT.build_batch raised RuntimeError: the disk is on fire (<string>, line 10)"
    assert first == f"the run failed: {raised}"
    assert hint.startswith("    the checkpoint after step 4 is kept; to go on: ")
    assert hint.endswith(f"run {config} --set algorithm.kind=broken_sft --run-id b")
    log = Path(where.removeprefix("    the whole log: ")).read_text()
    assert "Traceback" in log
    assert "the disk is on fire" in log

    # It can go on, but not as something else.
    other = ("--set", "algorithm.params.max_steps=4")
    done = flowtune("run", config, "--run-id", "b", *kind, *other, env=env, command=command)
    assert done.returncode == 2
    assert "algorithm.params.max_steps: run 'b' was started with 8, not 4\n    -> " in done.stderr
    assert "nothing was started" in done.stderr


def start_slow(
    config: Path, run_id: str, env: dict[str, str], step_seconds: float
) -> subprocess.Popen[str]:
    """A run of 40 steps that has come to its first checkpoint."""
    slow = f"backend={{kind: mock, params: {{step_seconds: {step_seconds}}}}}"
    settings = ["--set", slow, "--set", "algorithm.params.max_steps=40"]
    command = [*FLOWTUNE, "run", str(config), "--run-id", run_id, *settings]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)
    manifest = config.parent / f"runs/{run_id}/checkpoints/step-000004/manifest.json"
    deadline = time.monotonic() + 120
    while not manifest.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return process


def flow_run(server: PrefectServer, name: str) -> dict[str, Any]:
    """The flow run of that name."""
    wanted = {"flow_runs": {"name": {"any_": [name]}}}
    answer = httpx.post(f"{server.api_url}/flow_runs/filter", json=wanted, trust_env=False)
    [found] = answer.json()
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("way", ["SIGINT", "SIGTERM", "Prefect"])
def test_an_interrupted_run_saves_ends_with_130_and_says_how_to_go_on(
    prefect_server: PrefectServer, config: Path, tmp_path: Path, way: str
) -> None:
    name = f"stopped-by-{way}"
    process = start_slow(config, name, prefect_server.environment, 0.3)
    if way == "Prefect":
        url = f"{prefect_server.api_url}/flow_runs/{flow_run(prefect_server, name)['id']}/set_state"
        httpx.post(url, json={"state": {"type": "CANCELLING"}}, trust_env=False)
    else:
        process.send_signal(signal.Signals[way])
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "stopping: a checkpoint is written first" in out
    assert err.splitlines()[0] == "interrupted"
    assert "Traceback" not in out + err
    result = json.loads((tmp_path / f"runs/{name}/result.json").read_text())
    assert result["status"] == "cancelled"
    kept = sorted(path.name for path in (tmp_path / f"runs/{name}/checkpoints").iterdir())
    done = int(kept[-1].removeprefix("step-"))
    assert 4 < done < 40
    assert f"the checkpoint after step {done} is kept; to go on: " in err
    assert flow_run(prefect_server, name)["state"]["type"] == "CANCELLED"


def test_a_second_ctrl_c_ends_at_once(
    prefect_server: PrefectServer, config: Path, tmp_path: Path
) -> None:
    process = start_slow(config, "at-once", prefect_server.environment, 1.0)
    assert process.stdout is not None
    process.send_signal(signal.SIGINT)
    while "stopping: " not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(2) == 130
    process.communicate()
    assert not (tmp_path / "runs/at-once/result.json").exists()


def test_a_run_that_another_process_took_over_says_so_and_ends_with_3(
    prefect_server: PrefectServer, config: Path, tmp_path: Path
) -> None:
    process = start_slow(config, "taken", prefect_server.environment, 0.05)
    RunStore(tmp_path / "runs", "taken").take_lease("http://prefect/the-other")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 3, err
    assert err.startswith("taken over: run taken is no longer this process's to write: process ")
    assert "http://prefect/the-other" in err
    assert "Traceback" not in out + err
    assert "to go on" not in err


def test_a_dry_run_needs_no_server_shows_a_row_and_keeps_nothing(
    config: Path, nowhere: dict[str, str], tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    env = {**nowhere, "TMPDIR": str(scratch)}
    done = flowtune("run", config, "--dry-run", env=env)
    assert done.returncode == 0, done.stderr
    assert "one row as it is trained on" in done.stdout
    # What the loss counts is marked: the answer and the end of the turn, not the question.
    row = done.stdout.split("):")[1]
    question, answer = row[: row.index("⟦")], row[row.index("⟦") + 1 : row.index("⟧")]
    asked = question.split("What is ")[1].split(" +")[0]
    assert answer == f"{2 * int(asked)}<|im_end|>"
    assert "  step 3/3  loss" in done.stdout
    assert "nothing was kept" in done.stdout
    assert not (tmp_path / "runs").exists()
    assert list(scratch.iterdir()) == []


def row(step: int, loss: float, seconds: float) -> dict[str, float]:
    speed = 800 / seconds
    return {
        "step": step,
        "train_mean_nll": loss,
        "time/step": seconds,
        "time/tokens_per_second": speed,
    }


@pytest.mark.parametrize("on_a_terminal", [True, False])
def test_progress_has_loss_speed_and_time_left(on_a_terminal: bool) -> None:
    from rich.console import Console

    from algorithms.callbacks import RunPlan
    from flows.terminal import Terminal

    output = io.StringIO()
    console = Console(file=output, force_terminal=on_a_terminal, width=100, highlight=False)
    with Terminal(console) as terminal:
        terminal.phase("opening the run")
        terminal.on_start(RunPlan("r", "/r", 100, 200, (200,), "http://prefect/1"))
        terminal.on_step(row(101, 2.0, 30.0))  # warming up: counts for nothing later
        for step in range(102, 200):
            terminal.on_step(row(step, 0.5, 0.1))
        terminal.on_step(row(200, 0.25, 0.1))
    shown = output.getvalue()
    assert "200 steps, from step 100" in shown
    assert "200/200" in shown
    assert "loss 0.250  8,000 tokens/s" in shown
    assert ("━" in shown) == on_a_terminal
    if not on_a_terminal:
        # Two lines: the first step of this part, with 99 to go at 30 s, and the last.
        steps = [line for line in shown.splitlines() if line.startswith("  step")]
        assert steps[0] == "  step 101/200  loss 2.00  27 tokens/s  49:30 left"
        assert len(steps) == 2


# --- mistakes


def test_every_mistake_is_told_at_once_and_nothing_is_started(
    config: Path, nowhere: dict[str, str], tmp_path: Path
) -> None:
    wrong = ["--set", "algorithm.kind=mok_sft", "--set", "nme=x", "--set", "data.path=x.jsonl"]
    for command in ("run", "validate"):
        done = flowtune(command, config, *wrong, env=nowhere)
        assert done.returncode == 2
        told = done.stderr
        assert "algorithm.kind: there is no algorithm 'mok_sft'\n    -> did you mean" in told
        assert "nme: unknown field\n    -> did you mean 'name'?" in told
        assert "data.path: unknown field\n    -> the fields here are" in told
        assert told.endswith(" problems; nothing was started\n")
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "home").exists()


def test_a_missing_file_names_its_neighbour(config: Path, nowhere: dict[str, str]) -> None:
    done = flowtune("run", config.with_name("experimnt.yaml"), env=nowhere)
    assert done.returncode == 2
    assert "there is no such file\n    -> did you mean" in done.stderr


def test_a_run_id_that_cannot_name_a_folder_is_refused(
    config: Path, nowhere: dict[str, str], tmp_path: Path
) -> None:
    done = flowtune("run", config, "--run-id", "../up", env=nowhere)
    assert done.returncode == 2
    assert "run id: '../up' cannot name a run\n    -> " in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_prefect_server_that_is_away_is_told_before_anything_is_written(
    config: Path, nowhere: dict[str, str], tmp_path: Path
) -> None:
    done = flowtune("run", config, env=nowhere)
    assert done.returncode == 2
    assert done.stderr.startswith("PREFECT_API_URL: http://127.0.0.1:9/api does not answer\n    ->")
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "home").exists()


# --- the other commands


def test_validate_says_that_all_is_well(config: Path, nowhere: dict[str, str]) -> None:
    done = flowtune("validate", config, env=nowhere)
    assert done.returncode == 0
    first, *taken = done.stdout.splitlines()
    assert first == "cli is in order"
    assert [line.split()[:2] for line in taken[:2]] == [["rows", "20"], ["steps", "8"]]
    done = flowtune("validate", config, "--json", "--set", "seed=7", env=nowhere)
    resolved = json.loads(done.stdout)
    assert (resolved["seed"], resolved["algorithm"]["params"]["lora_rank"]) == (7, 16)


def test_list_names_every_kind_and_where_it_comes_from(nowhere: dict[str, str]) -> None:
    done = flowtune("list", env={**nowhere, "COLUMNS": "200"})
    assert done.returncode == 0
    lines = [line.split() for line in done.stdout.splitlines()]
    kinds = {word for line in lines for word in line[:2]}
    groups = {"algorithms", "backends", "data", "verifiers"}
    assert groups | {"sft", "mock_sft", "embedded", "tinker", "jsonl", "exact_match"} <= kinds
    sft = next(line for line in done.stdout.splitlines() if " sft " in line)
    assert "Supervised fine-tuning" in sft
    assert sft.rstrip().endswith("built in")


def test_schema_of_the_experiment_and_of_one_kind(nowhere: dict[str, str]) -> None:
    whole = json.loads(flowtune("schema", env=nowhere).stdout)
    assert {"name", "data", "algorithm", "backend"} <= set(whole["properties"])
    sft = json.loads(flowtune("schema", "algorithm", "sft", env=nowhere).stdout)
    assert "supervise" in sft["properties"]
    assert sft["properties"]["learning_rate"]["description"]
    done = flowtune("schema", "algorithm", "sfd", env=nowhere)
    assert done.returncode == 2
    assert "there is no algorithm 'sfd'\n    -> did you mean 'sft'?" in done.stderr
    done = flowtune("schema", "algoritm", env=nowhere)
    assert done.returncode == 2
    assert "did you mean 'algorithm'?" in done.stderr


def test_schema_of_stages(nowhere: dict[str, str]) -> None:
    from jsonschema import Draft202012Validator

    staged = json.loads(flowtune("schema", "stages", env=nowhere).stdout)
    validator = Draft202012Validator(staged)
    for name in ("sft_then_dpo", "sft_then_rl"):
        example = yaml.safe_load(Path(f"examples/{name}.yaml").read_text())
        assert list(validator.iter_errors(example)) == []
        example["stages"][1]["algorithm"]["params"]["batch_size"] = 0
        assert not validator.is_valid(example)
        assert not validator.is_valid(example | {"stages": []})
    done = flowtune("schema", "stages", "sft", env=nowhere)
    assert (done.returncode, "takes no name, such as 'sft'" in done.stderr) == (2, True)


def staged(config: Path) -> list[str]:
    """What makes two stages of the file."""
    both = yaml.safe_load(config.read_text())
    inside = {name: both.pop(name) for name in ("data", "algorithm", "evaluations")}
    stages = [{"name": name, **inside} for name in ("first", "second")]
    config.write_text(yaml.safe_dump({**both, "stages": stages}))
    return ["--set", "stages.1.algorithm.params.max_steps=5"]


def test_validate_says_what_each_stage_takes_and_all_of_them(
    config: Path, nowhere: dict[str, str]
) -> None:
    done = flowtune("validate", config, *staged(config), env=nowhere)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line for line in lines if line[0] in ("stage", "all", "steps")] == [
        ["stage", "first"],
        ["steps", "8"],
        ["stage", "second"],
        ["steps", "5"],
        ["all", "stages"],
        ["steps", "13"],
    ]


def test_a_mistake_in_a_stage_is_told_before_anything_starts(
    config: Path, nowhere: dict[str, str], tmp_path: Path
) -> None:
    wrong = [*staged(config), "--set", "stages.1.algorithm.params.batch_size=0"]
    wrong += ["--set", "algorithm.params.max_steps=3", "--set", "stages.0.dat=1"]
    for command in ("run", "validate"):
        done = flowtune(command, config, *wrong, env=nowhere)
        assert done.returncode == 2
        assert "stages[1].algorithm.params.batch_size: 0 should be greater" in done.stderr
        assert "algorithm: each stage has its own\n    -> write it into the stages" in done.stderr
        assert "stages[0].dat: unknown field\n    -> did you mean 'data'?" in done.stderr
        assert done.stderr.endswith("3 problems; nothing was started\n")
    assert not (tmp_path / "runs").exists()
    done = flowtune("validate", config, "--set", "stages.2.name=x", env=nowhere)
    assert "stages has no item 2\n    -> count from 0 to 1" in done.stderr


def test_a_folder_is_no_experiment(config: Path, nowhere: dict[str, str]) -> None:
    done = flowtune("validate", config.parent, env=nowhere)
    assert (done.returncode, "is a folder\n    -> name a YAML file" in done.stderr) == (2, True)


def test_runs_lists_what_a_store_holds(nowhere: dict[str, str], tmp_path: Path) -> None:
    from backends.storage.run_store import RunStore

    store = tmp_path / "runs"
    done = flowtune("runs", store, env=nowhere)
    assert (done.returncode, done.stdout) == (0, f"no runs in {store}\n")
    begun = RunStore(store, "one")
    begun.begin(name="sums", backend="mock", seed=0, total_steps=12)
    done = flowtune("runs", store, env={**nowhere, "COLUMNS": "120"})
    head, line = done.stdout.splitlines()
    assert head.split() == ["run", "name", "status", "steps", "score", "created"]
    assert line.split()[:4] == ["one", "sums", "unfinished", "0/12"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--base-model", "/no/such/folder", "--api-key", "tml-x"], "there is no folder /no/such"),
        (["--base-model", ".", "--api-key", "secret"], "does not start with tml-"),
    ],
)
def test_the_engine_tells_mistakes(
    nowhere: dict[str, str], tmp_path: Path, options: list[str], told: str
) -> None:
    done = flowtune("engine", *options, "--store", tmp_path / "engine", env=nowhere)
    assert done.returncode == 2
    assert told in done.stderr
    assert not (tmp_path / "engine").exists()
