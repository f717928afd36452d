"""The algorithms that TRL trains: what is refused, exact resume, and sampling between steps.

Real runs of the tiny model, in this process; the engine and whole processes are in
`test_local_two_ways.py`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import random
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from tinker import types as tinker_types

from algorithms.base import BaseAlgorithm, OwnLoop, RunContext
from algorithms.callbacks import Callback, EarlyEnd
from algorithms.experiment import Experiment, parse_experiment
from algorithms.local.options import REFUSED, LocalConfig, refused
from algorithms.local.randomness import random_state, seed_step, set_random_state
from algorithms.local.run import OwnLoopRun
from algorithms.local_dpo import LocalDPO, LocalDPOConfig
from algorithms.local_rl import LocalRL
from algorithms.local_sft import LocalSFT
from algorithms.opening import open_live_run
from algorithms.registry import ALGORITHMS
from algorithms.run import RunStopped
from backends.base import ModelSpec
from backends.errors import UserError
from backends.local import LocalBackend, LocalKind, LocalParams
from backends.local_state import pack, read_state, write_state
from backends.storage.run_store import RunStore

MODEL = "examples/models/tiny-qwen3"
ARITHMETIC = Path("examples/data/arithmetic")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "local_sft": ("train.jsonl", {}),
    "local_dpo": ("preferences.jsonl", {}),
    "local_rl": ("train.jsonl", {"num_samples": 2, "max_tokens": 6, "kl_penalty_coef": 0.1}),
}
"""The rows and the parameters that a short run of each kind takes."""


def document(kind: str, store: Path, **params: Any) -> dict[str, Any]:
    file, own = CASES[kind]
    shared = {"batch_size": 2, "max_steps": 4, "learning_rate": 0.003, "lora_rank": 4}
    return {
        "name": "local",
        "store": str(store),
        "model": {"name": MODEL},
        "data": {"kind": "jsonl", "path": str(ARITHMETIC / file)},
        "algorithm": {"kind": kind, "params": {**shared, "save_every": 2, **own, **params}},
        "backend": {"kind": "local", "params": {"threads": 1}},
    }


def experiment(kind: str, store: Path, **params: Any) -> Experiment:
    return parse_experiment(document(kind, store, **params))


async def opened(spec: Experiment, run_id: str = "run") -> OwnLoopRun:
    run = await open_live_run(spec, RunStore(spec.store, run_id))
    assert isinstance(run, OwnLoopRun)
    return run


async def trained(run: OwnLoopRun) -> OwnLoopRun:
    """Train until the end, and close."""
    try:
        await run.run_segment(run, run.plan.first_step, *run.segment_ends)
        await run.settle()
    finally:
        await run.cancel()
        await run.backend.aclose()
    return run


def rows_of(run: OwnLoopRun) -> list[dict[str, float]]:
    """The metrics that are the same in every replay."""
    rows = run.store.metrics()
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def files_of(run: OwnLoopRun) -> dict[str, str]:
    """The digests of the last checkpoint's files."""
    manifest = run.store.latest_checkpoint()
    assert manifest is not None
    return {file.path: file.sha256 for file in manifest.files}


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=sorted(CASES))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# --- what is refused ----------------------------------------------------------------------------


def test_every_algorithm_with_a_loop_of_its_own_is_a_row_here() -> None:
    assert {k for k, row in ALGORITHMS.rows().items() if issubclass(row.item, OwnLoop)} == set(
        CASES
    )


def test_its_parameters_survive_a_document(kind: str, tmp_path: Path) -> None:
    spec = experiment(kind, tmp_path, trainer={"neftune_noise_alpha": 5})
    assert parse_experiment(json.loads(json.dumps(spec.model_dump(mode="json")))) == spec


def test_its_form_has_a_description_for_every_field(kind: str) -> None:
    for name, field in ALGORITHMS[kind].Config.model_json_schema()["properties"].items():
        assert "$ref" in field or field.get("description"), f"{kind}.{name} says nothing of itself"


def test_the_backend_is_local_by_itself(kind: str, tmp_path: Path) -> None:
    left_out = document(kind, tmp_path)
    del left_out["backend"]
    assert parse_experiment(left_out).backend.kind == "local"


@pytest.mark.parametrize(("algorithm", "backend"), [("local_sft", "embedded"), ("sft", "local")])
def test_a_backend_that_does_not_fit_is_refused(
    algorithm: str, backend: str, tmp_path: Path
) -> None:
    wrong = document("local_sft", tmp_path) | {"backend": {"kind": backend}}
    wrong["algorithm"]["kind"] = algorithm
    with pytest.raises(UserError) as refusal:
        parse_experiment(wrong)
    assert [problem.where for problem in refusal.value.problems] == ["backend"]


@pytest.mark.parametrize("option", sorted(refused(REFUSED)))
def test_options_that_break_a_promise_are_refused_by_name(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} cannot be set: {refused(REFUSED)[option]}"):
        LocalConfig(trainer={option: None})


def test_each_kind_refuses_the_options_it_has_itself(kind: str, tmp_path: Path) -> None:
    config: Any = ALGORITHMS[kind].Config
    for option, why in refused(config.REFUSED_TOO).items():
        with pytest.raises(UserError, match=f"{option} cannot be set: {why}"):
            experiment(kind, tmp_path, trainer={option: 1})


def test_refused_options_are_options_of_trl() -> None:
    import dataclasses

    from trl import DPOConfig, GRPOConfig, SFTConfig

    known = {f.name for cls in (SFTConfig, DPOConfig, GRPOConfig) for f in dataclasses.fields(cls)}
    assert refused(REFUSED).keys() <= known


def test_an_option_that_trl_does_not_have_is_named(kind: str, tmp_path: Path) -> None:
    spec = experiment(kind, tmp_path, trainer={"gradient_checkpoint": True})
    with pytest.raises(UserError, match="did you mean gradient_checkpointing") as refusal:
        spec.algorithm.build()
    assert refusal.value.problems[0].where == "algorithm.params.trainer.gradient_checkpoint"


@pytest.mark.parametrize(
    ("kind", "option", "value", "words"),
    [
        ("local_sft", "neftune_noise_alpha", "five", "'five' should be a valid number"),
        ("local_sft", "gradient_checkpointing", "yes please", "should be a valid boolean"),
        ("local_sft", "gradient_checkpointing", "yes", "should be a valid boolean"),
        ("local_sft", "dataloader_num_workers", "two", "'two' should be a valid integer"),
        ("local_sft", "optim", "adamw_troch", "did you mean adamw_torch"),
        ("local_rl", "scale_rewards", 2, "should be a valid"),
        ("local_sft", "scale_rewards", True, "has no such option"),
    ],
)
def test_a_value_of_another_type_is_refused(
    kind: str, option: str, value: Any, words: str, tmp_path: Path
) -> None:
    spec = experiment(kind, tmp_path, trainer={option: value})
    with pytest.raises(UserError, match=words) as refusal:
        spec.algorithm.build()
    assert refusal.value.problems[0].where == f"algorithm.params.trainer.{option}"


@pytest.mark.parametrize(
    ("kind", "trainer"),
    [
        ("local_sft", {"neftune_noise_alpha": 5, "optim": "sgd", "gradient_checkpointing": True}),
        ("local_sft", {"optim_target_modules": ["q_proj"], "dataloader_prefetch_factor": None}),
        ("local_dpo", {"loss_weights": [1], "debug": "underflow_overflow"}),
        ("local_rl", {"scale_rewards": False, "chat_template_kwargs": {"enable_thinking": False}}),
        ("local_rl", {"generation_kwargs": {"no_repeat_ngram_size": 3}, "epsilon_high": 1}),
    ],
)
def test_values_of_the_right_type_are_taken(
    kind: str, trainer: dict[str, Any], tmp_path: Path
) -> None:
    experiment(kind, tmp_path, trainer=trainer).algorithm.build()


def test_without_trl_its_options_are_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = experiment("local_sft", tmp_path, trainer={"no_such_option": 1})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    spec.algorithm.build()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_new_tokens": 3}, "generation_kwargs.max_new_tokens cannot be set: use max_tokens"),
        ({"temperature": 0.1}, "generation_kwargs.temperature cannot be set: use temperature"),
        ({"eos_token_id": 5}, "generation_kwargs.eos_token_id cannot be set: an answer ends"),
        ('{"do_sample": false}', "generation_kwargs is no mapping"),
    ],
)
def test_how_a_rollout_is_sampled_is_said_once(given: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        experiment("local_rl", tmp_path, trainer={"generation_kwargs": given})


@pytest.mark.parametrize(
    ("kind", "field", "kinds"),
    [
        ("sft", "micro_batch_size", "local_dpo, local_rl, local_sft"),
        ("sft", "reduction", "local_sft"),
        ("local_sft", "max_tokens_per_batch", "mock_sft, sft"),
    ],
)
def test_a_field_of_another_kind_is_told_as_that(
    kind: str, field: str, kinds: str, tmp_path: Path
) -> None:
    moved = document("local_sft", tmp_path)
    moved["algorithm"] = {"kind": kind, "params": {field: 1}}
    moved["backend"] = {"kind": "local" if kind == "local_sft" else "mock"}
    with pytest.raises(UserError) as refusal:
        parse_experiment(moved)
    (problem,) = refusal.value.problems
    assert problem.what == "unknown field"
    assert problem.remedy == f"leave it out: it is a field of {kinds} only"


def test_an_adapter_on_the_head_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="TRL trains no adapter on lm_head"):
        experiment(kind, tmp_path, train_unembed=True)


def test_a_batch_is_made_of_whole_micro_batches(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no multiple of micro_batch_size 3"):
        experiment(kind, tmp_path, batch_size=4, micro_batch_size=3)


# --- state on disk ------------------------------------------------------------------------------


def test_a_training_state_comes_back_to_the_last_bit(tmp_path: Path) -> None:
    tree = {
        "state": {0: {"exp_avg": torch.randn(3, 2), "step": torch.tensor(7.0)}},
        "groups": [{"lr": 0.1 + 0.2, "betas": (0.9, 0.95), "fused": True, "name": None}],
        "keys": np.arange(4, dtype=np.uint32),
    }
    write_state(tmp_path, tree)
    back = read_state(tmp_path)
    assert torch.equal(back["state"][0]["exp_avg"], tree["state"][0]["exp_avg"])  # type: ignore[index]
    assert back["groups"] == tree["groups"]
    assert back["keys"].dtype == np.uint32
    assert back["keys"].tolist() == [0, 1, 2, 3]
    assert read_state(tmp_path / "nowhere") is None


def test_what_is_no_data_is_not_kept() -> None:
    with pytest.raises(TypeError, match="cannot hold a PosixPath"):
        pack({"folder": Path()})


def test_torchs_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    write_state(tmp_path, random_state())
    first = torch.rand(3)
    set_random_state(read_state(tmp_path))
    assert torch.equal(torch.rand(3), first)


def test_a_step_draws_the_same_numbers_whatever_was_drawn_before() -> None:
    def draws(seed: int, step: int, rank: int) -> tuple[float, float]:
        seed_step(seed, step, rank)
        return random.random(), float(np.random.rand())

    first = draws(3, 1, 0)
    assert draws(3, 1, 0) == first
    others = [draws(*which) for which in ((4, 1, 0), (3, 2, 0), (3, 1, 1))]
    assert len({first, *others}) == 4


# --- runs ---------------------------------------------------------------------------------------


class CutOff(Callback):
    """Ends a run's task as soon as a checkpoint is there."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.task: asyncio.Task[Any] | None = None

    def on_save(self, step: int, uri: str) -> None:
        if step == self.step and self.task is not None:
            self.task.cancel()


async def cut_off_after(step: int, run: OwnLoopRun) -> None:
    """Train, and be cancelled once the checkpoint after a step is there."""
    cut_off = CutOff(step)
    run.callbacks.append(cut_off)
    cut_off.task = asyncio.create_task(trained(run))
    with pytest.raises(asyncio.CancelledError):
        await cut_off.task


async def test_a_run_that_was_cut_off_ends_like_one_that_was_not(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although others draw from the process's generators between the steps, each time otherwise."""
    own = ALGORITHMS[kind].metrics  # type: ignore[attr-defined]
    count = itertools.count()

    def metrics(self: Any, step_idx: int, logs: Any) -> dict[str, float]:
        drawn = {"drawn/python": random.random(), "drawn/numpy": float(np.random.rand())}
        for _ in range(next(count)):
            random.random()
            np.random.rand()
        return {**own(self, step_idx, logs), **drawn}

    monkeypatch.setattr(ALGORITHMS[kind], "metrics", metrics)
    whole = await trained(await opened(experiment(kind, tmp_path / "whole")))
    cut = await opened(experiment(kind, tmp_path / "cut"))
    await cut_off_after(2, cut)
    assert cut.store.checkpoint_steps() == [2]
    again = await opened(experiment(kind, tmp_path / "cut"))
    assert again.plan.first_step == 2
    await trained(again)
    assert [row["step"] for row in rows_of(whole)] == [1, 2, 3, 4]
    assert rows_of(again) == rows_of(whole)
    assert files_of(again) == files_of(whole)
    assert {Path(name).suffix for name in files_of(whole)} == {".safetensors", ".json"}


async def test_a_reference_is_what_the_run_started_from_after_a_resume_too(tmp_path: Path) -> None:
    start = await trained(await opened(experiment("local_sft", tmp_path / "start")))
    manifest = start.store.latest_checkpoint()
    assert manifest is not None

    def spec(store: str) -> Experiment:
        later = document("local_dpo", tmp_path / store, learning_rate=1e-3)
        later["model"]["init_from"] = start.store.checkpoint_uri(manifest)
        return parse_experiment(later)

    whole = await trained(await opened(spec("whole")))
    assert rows_of(whole)[0]["dpo/margin"] == pytest.approx(0, abs=1e-6)
    await cut_off_after(2, await opened(spec("cut")))
    again = await trained(await opened(spec("cut")))
    assert rows_of(again) == rows_of(whole)
    assert files_of(again) == files_of(whole)


async def test_rollouts_are_scored_by_the_verifier_and_kept(tmp_path: Path) -> None:
    spec = experiment("local_rl", tmp_path, max_steps=1, num_samples=4)
    run = await trained(await opened(spec))
    rollouts = run.store.rollouts(1)
    rewards = [rollout["reward"] for rollout in rollouts]
    assert [rollout["group"] for rollout in rollouts] == [0] * 4 + [1] * 4
    assert run.store.metrics()[0]["reward/mean"] == pytest.approx(sum(rewards) / 8, abs=1e-6)
    asked = {rollout["messages"][0]["content"] for rollout in rollouts}
    known = {}
    for line in (ARITHMETIC / "train.jsonl").read_text().splitlines():
        question, answer = json.loads(line)["messages"]
        known[question["content"]] = answer["content"]
    assert asked <= known.keys()
    for rollout in rollouts:
        question, answer = (turn["content"] for turn in rollout["messages"])
        assert rollout["reward"] == float(answer.strip() == known[question])


async def test_an_epoch_is_cut_into_whole_micro_batches(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+{i}=", "completion": str(2 * i)} for i in range(5)]
    base = document("local_sft", tmp_path, num_epochs=2, max_steps=None, save_every=None)
    base["data"] = {"kind": "rows", "rows": rows}
    whole = await trained(await opened(parse_experiment(base), "whole"))
    assert whole.plan.total_steps == 6
    base["algorithm"]["params"]["micro_batch_size"] = 1
    parts = await trained(await opened(parse_experiment(base), "parts"))
    assert parts.plan.total_steps == 4  # an epoch's fifth row fills no batch
    one, two = rows_of(whole)[0], rows_of(parts)[0]
    assert one["tokens/supervised"] == two["tokens/supervised"]
    assert one["train_mean_nll"] == pytest.approx(two["train_mean_nll"], abs=1e-6)
    assert one["optim/grad_norm"] == pytest.approx(two["optim/grad_norm"], rel=1e-5)


async def test_a_mean_is_the_sum_over_its_tokens(tmp_path: Path) -> None:
    total = await trained(await opened(experiment("local_sft", tmp_path, max_steps=1), "sum"))
    mean = experiment("local_sft", tmp_path, max_steps=1, reduction="mean")
    averaged = await trained(await opened(mean, "mean"))
    one, two = rows_of(total)[0], rows_of(averaged)[0]
    assert one["train_mean_nll"] == pytest.approx(two["train_mean_nll"], abs=1e-6)
    ratio = one["optim/grad_norm"] / two["optim/grad_norm"]
    assert ratio == pytest.approx(one["tokens/supervised"], rel=1e-5)


class EndsAfter(Callback):
    """Wants the run to end after its second step."""

    def early_end(self) -> EarlyEnd | None:
        return EarlyEnd(2, "enough")


async def test_a_callback_ends_a_run_early(tmp_path: Path) -> None:
    document_ = document("local_sft", tmp_path, save_every=None)
    held_out = {"kind": "jsonl", "path": str(ARITHMETIC / "test.jsonl")}
    document_["evaluations"] = [
        {"name": "heldout", "data": held_out, "limit": 4, "max_tokens": 8},
        {"name": "likely", "kind": "nll", "data": held_out, "limit": 4},
    ]
    run = await opened(parse_experiment(document_))
    run.callbacks.append(EndsAfter())
    await trained(run)
    assert run.ended_early == "enough"
    assert run.store.checkpoint_steps() == [2]
    assert [(row["name"], row["step"]) for row in run.store.evaluations()] == [
        ("heldout", 0),
        ("likely", 0),
        ("heldout", 2),
        ("likely", 2),
    ]
    assert run.finish().status == "completed"


class Stops(Callback):
    """Asks the run to stop while its second step is under way."""

    def __init__(self, run: OwnLoopRun) -> None:
        self.run = run

    def on_step(self, row: Any) -> None:
        if row["step"] == 1:
            self.run.stop()


async def test_a_run_that_is_stopped_saves_first(tmp_path: Path) -> None:
    run = await opened(experiment("local_sft", tmp_path, save_every=None))
    run.callbacks.append(Stops(run))
    with pytest.raises(RunStopped, match="after 2 of 4 steps"):
        await trained(run)
    assert run.store.checkpoint_steps() == [2]


async def test_it_trains_by_itself(tmp_path: Path) -> None:
    """`train(ctx)`: one full run, without Prefect."""
    spec = experiment("local_sft", tmp_path, max_steps=1)
    backend = await spec.backend.row().open(spec.backend.params, spec.model_spec(), None)
    algorithm: BaseAlgorithm = spec.algorithm.build()
    tokenizer = backend.get_tokenizer()
    context = RunContext("run", str(tmp_path), spec, spec.data.load(), backend, tokenizer)
    result = await algorithm.train(context)
    await backend.aclose()
    assert result.status == "completed"


@pytest.mark.parametrize(
    ("kind", "trainer", "words"),
    [
        ("local_sft", {"loss_type": "bla"}, "Invalid `loss_type` bla passed"),  # as it is made
        ("local_sft", {"activation_offloading": True}, "has no attribute 'type'"),
        ("local_sft", {"dataloader_num_workers": -1}, "num_workers option should be non-negative"),
        ("local_rl", {"scale_rewards": "abc"}, "Invalid value for scale_rewards: abc"),  # at step 1
    ],
)
async def test_a_value_that_trl_refuses_is_told_in_its_words(
    kind: str, trainer: dict[str, Any], words: str, tmp_path: Path
) -> None:
    run = await opened(experiment(kind, tmp_path, trainer=trainer))
    with pytest.raises(UserError, match=words) as refusal:
        await trained(run)
    (problem,) = refusal.value.problems
    assert problem.where == "algorithm.params.trainer"
    assert problem.remedy == f"leave them out one by one: {', '.join(trainer)}"


async def test_the_first_steps_time_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await opened(experiment("local_sft", tmp_path, max_steps=1))
    made = LocalSFT.trainer

    def slow(self: LocalSFT, arguments: dict[str, Any]) -> Any:
        run._step_ended = time.monotonic() - 1000  # as if TRL had taken so long to be imported
        return made(self, arguments)

    monkeypatch.setattr(LocalSFT, "trainer", slow)
    await trained(run)
    assert run.store.metrics()[0]["time/step"] < 1000


async def test_another_loss_has_another_name(tmp_path: Path) -> None:
    spec = experiment("local_sft", tmp_path, max_steps=1, trainer={"loss_type": "dft"})
    (row,) = rows_of(await trained(await opened(spec)))
    assert "train_mean_nll" not in row
    assert row["loss"] > 0


# --- rows and the model's limits ----------------------------------------------------------------


def changed_model(folder: Path, **changes: dict[str, Any]) -> str:
    """The tiny model with other values in its JSON files, by their names without suffix."""
    shutil.copytree(MODEL, folder)
    for name, values in changes.items():
        file = folder / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return str(folder)


async def test_rows_are_cut_where_the_model_ends(tmp_path: Path) -> None:
    """Its tokenizer says that it reads 1024 tokens."""
    model = changed_model(tmp_path / "model", config={"max_position_embeddings": 22})
    for kind in ("local_sft", "local_dpo"):
        short = document(kind, tmp_path, max_steps=1)
        short["model"]["name"] = model
        run = await opened(parse_experiment(short), kind)
        algorithm: Any = run.algorithm
        rendering = algorithm._rendering
        assert rendering.cut > 0
        if kind == "local_sft":
            assert max(rendering.lengths) == 21
        await run.backend.aclose()


async def test_a_prompt_that_leaves_no_room_is_refused_by_row(tmp_path: Path) -> None:
    long = document("local_rl", tmp_path, max_tokens=1010)
    with pytest.raises(UserError, match=r"a prompt of \d+ tokens, and the model reads 1024") as no:
        await opened(parse_experiment(long))
    assert "train.jsonl:1" in str(no.value)
    assert "lower max_tokens, which is 1010" in str(no.value)


async def test_a_prompt_that_the_template_refuses_is_refused_by_row(tmp_path: Path) -> None:
    odd = document("local_rl", tmp_path)
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    rows = [{"messages": turns}, {"messages": [{"role": "developer", "content": "Be."}, *turns]}]
    odd["data"] = {"kind": "rows", "rows": rows}
    with pytest.raises(UserError, match="template refuses the row: unknown role: developer"):
        await opened(parse_experiment(odd))


async def test_rollouts_end_where_the_template_ends_a_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a model whose eos is another token, as a base model's is."""
    model = changed_model(
        tmp_path / "model",
        tokenizer_config={"eos_token": "<|endoftext|>"},
        generation_config={"eos_token_id": 0},
        config={"eos_token_id": 0},
    )
    end_of_turn, drawn = 1, []

    def reward(self: LocalRL, *, completion_ids: Any, **_: Any) -> list[float]:
        drawn.extend(completion_ids)
        return [0.0] * len(completion_ids)

    monkeypatch.setattr(LocalRL, "reward", reward)
    spec = document("local_rl", tmp_path, max_steps=1, num_samples=8, max_tokens=16)
    spec["model"]["name"] = model
    await trained(await opened(parse_experiment(spec)))
    assert any(tokens[-1] == end_of_turn for tokens in drawn)
    assert not any(end_of_turn in tokens[:-1] for tokens in drawn)


async def test_turns_of_others_in_an_answer_do_not_count(tmp_path: Path) -> None:
    """As in dpo: an answer may go on over several turns."""
    ask = {"role": "user", "content": "1+1?"}
    more = {"role": "user", "content": "Sure?"}

    def answer(first: str, second: str) -> list[dict[str, str]]:
        said = ({"role": "assistant", "content": text} for text in (first, second))
        return [next(said), more, next(said)]

    rows = [{"prompt": [ask], "chosen": answer("2", "yes"), "rejected": answer("3", "no")}] * 2
    spec = document("local_dpo", tmp_path, max_steps=1)
    spec["data"] = {"kind": "rows", "rows": rows}
    run = await opened(parse_experiment(spec))
    seen: list[dict[str, Any]] = []
    made = LocalDPO.trainer

    def noting(self: LocalDPO, arguments: dict[str, Any]) -> Any:
        trainer = made(self, arguments)
        collate = trainer.data_collator
        trainer.data_collator = lambda rows: seen.append(collate(rows)) or seen[-1]
        return trainer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalDPO, "trainer", noting)
        await trained(run)
    tokenizer = run.backend.get_tokenizer()
    batch = seen[0]
    counted = [
        tokenizer.decode(ids[mask.bool()])
        for ids, mask in zip(batch["input_ids"], batch["completion_mask"], strict=True)
    ]
    assert counted == ["2<|im_end|>yes<|im_end|>"] * 2 + ["3<|im_end|>no<|im_end|>"] * 2
    assert rows_of(run)[0]["tokens/supervised"] == batch["completion_mask"].sum()


@pytest.mark.parametrize("kind", ["dpo", "local_dpo"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": 0.5}, "weight is 0.5, and all pairs count alike"),
        ({"train": False}, "no turn of chosen counts: each has train: false or the weight 0"),
        ({"turn": 0.5}, "a turn of chosen has the weight 0.5, and pairs are not weighted"),
        ({"weight": 1, "turn": 1, "train": True}, None),
    ],
)
def test_weights_of_pairs_are_refused(kind: str, change: dict[str, Any], words: str | None) -> None:
    turn = {"role": "assistant", "content": "2"}
    turn |= {"weight": change["turn"]} if "turn" in change else {}
    turn |= {"train": change["train"]} if "train" in change else {}
    row = {
        "prompt": [{"role": "user", "content": "1+1?"}],
        "chosen": [turn],
        "rejected": [{"role": "assistant", "content": "3"}],
    }
    row |= {"weight": change["weight"]} if "weight" in change else {}
    problem = ALGORITHMS[kind].check_row(row, "here")
    assert (problem and problem.what) == words


async def test_weights_that_count_otherwise_are_refused_by_row(tmp_path: Path) -> None:
    weighted = document("local_sft", tmp_path)
    rows = [{"prompt": "1+1=", "completion": "2", "weight": weight} for weight in (1, 0.5)]
    weighted["data"] = {"kind": "rows", "rows": rows}
    with pytest.raises(UserError, match="TRL counts every token once"):
        await opened(parse_experiment(weighted))


# --- sampling -----------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend() -> AsyncIterator[LocalBackend]:
    """The tiny model with an adapter that does something."""
    spec = ModelSpec(name=MODEL, lora_rank=4, train_unembed=False)
    opened = await LocalKind.open(LocalParams(), spec, None)
    assert isinstance(opened, LocalBackend)
    with torch.no_grad():
        for name, parameter in opened.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05, generator=torch.Generator().manual_seed(1))
    yield opened
    await opened.aclose()


def prompts(backend: LocalBackend) -> list[list[int]]:
    tokenizer = backend.get_tokenizer()
    return [
        tokenizer(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
        for text in ("What is 86 + 87?", "What is 4 + 5?", "hm")
    ]


async def sample(
    backend: LocalBackend, tokens: list[int], num_samples: int = 1, **params: Any
) -> Any:
    client = await backend.snapshot_sampling_client()
    given = {"max_tokens": 12, "temperature": 0.0, **params}
    prompt = tinker_types.ModelInput.from_ints(tokens)
    return await client.sample(prompt, num_samples, tinker_types.SamplingParams(**given))


@pytest.mark.asyncio(loop_scope="module")
async def test_greedy_samples_are_those_of_generate(backend: LocalBackend) -> None:
    asked = prompts(backend)
    client = await backend.snapshot_sampling_client()
    params = tinker_types.SamplingParams(max_tokens=12, temperature=0.0)
    answers = await asyncio.gather(
        *(client.sample(tinker_types.ModelInput.from_ints(p), 1, params) for p in asked)
    )
    for prompt, answer in zip(asked, answers, strict=True):
        ids = torch.tensor([prompt])
        (expected,) = backend.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12
        )[:, len(prompt) :].tolist()
        (sequence,) = answer.sequences
        assert list(sequence.tokens) == expected
        ended = "stop" if expected[-1] == backend.get_tokenizer().eos_token_id else "length"
        assert sequence.stop_reason == ended


@pytest.mark.asyncio(loop_scope="module")
async def test_logprobs_are_those_of_a_forward_pass(backend: LocalBackend) -> None:
    prompt = prompts(backend)[0]
    answer = await sample(backend, prompt, temperature=1.0, seed=3)
    (sequence,) = answer.sequences
    whole = [*prompt, *sequence.tokens]
    with torch.no_grad():
        logits = backend.model(torch.tensor([whole])).logits[0].double()
    logprobs = logits.log_softmax(-1)[torch.arange(len(whole) - 1), torch.tensor(whole[1:])]
    assert sequence.logprobs == pytest.approx(logprobs[len(prompt) - 1 :].tolist(), abs=1e-4)
    client = await backend.snapshot_sampling_client()
    params = tinker_types.SamplingParams(max_tokens=1, temperature=0.0)
    scored = await client.sample(
        tinker_types.ModelInput.from_ints(whole), 1, params, include_prompt_logprobs=True
    )
    assert scored.prompt_logprobs[0] is None
    assert scored.prompt_logprobs[1:] == pytest.approx(logprobs.tolist(), abs=1e-4)


@pytest.mark.asyncio(loop_scope="module")
async def test_samples_follow_the_distribution(backend: LocalBackend) -> None:
    prompt = prompts(backend)[2]
    with torch.no_grad():
        logits = backend.model(torch.tensor([prompt])).logits[0, -1].double()
    probs = (logits / 1.5).softmax(-1)
    top = probs.topk(3)
    answer = await sample(
        backend, prompt, 2000, max_tokens=1, temperature=1.5, top_k=3, seed=5, stop=[]
    )
    drawn = [sequence.tokens[0] for sequence in answer.sequences]
    assert set(drawn) <= set(top.indices.tolist())
    expected = (top.values / top.values.sum()).tolist()
    for token, share in zip(top.indices.tolist(), expected, strict=True):
        assert drawn.count(token) / 2000 == pytest.approx(share, abs=0.04)  # 3.6 sigma at 1/2


@pytest.mark.asyncio(loop_scope="module")
async def test_a_seed_decides_and_nobody_elses_numbers_are_drawn(backend: LocalBackend) -> None:
    prompt = prompts(backend)[0]
    before = torch.get_rng_state()
    one, two = [
        await sample(backend, prompt, 3, temperature=2.0, seed=7, max_tokens=6) for _ in range(2)
    ]
    assert torch.equal(torch.get_rng_state(), before)
    drawn = [list(sequence.tokens) for sequence in one.sequences]
    assert drawn == [list(sequence.tokens) for sequence in two.sequences]
    assert len({tuple(tokens) for tokens in drawn}) == 3


@pytest.mark.asyncio(loop_scope="module")
async def test_the_base_answers_without_its_adapter(backend: LocalBackend) -> None:
    from transformers import AutoModelForCausalLM

    prompt = prompts(backend)[0]
    client = await backend.open_sampling_client()
    params = tinker_types.SamplingParams(max_tokens=8, temperature=0.0)
    answer = await client.sample(tinker_types.ModelInput.from_ints(prompt), 1, params)
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    ids = torch.tensor([prompt])
    expected = base.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8
    )
    assert list(answer.sequences[0].tokens) == expected[0, len(prompt) :].tolist()
    with pytest.raises(UserError, match="take embedded for other models"):
        await backend.open_sampling_client("another/model")


@pytest.mark.asyncio(loop_scope="module")
async def test_what_the_sampler_cannot_do_is_refused(backend: LocalBackend) -> None:
    prompt = prompts(backend)[0]
    with pytest.raises(UserError, match="stops at tokens only"):
        await sample(backend, prompt, stop=["\n"])
    with pytest.raises(UserError, match="the model reads 1024"):
        await sample(backend, prompt * 200)
    with pytest.raises(UserError, match="local trains with TRL only"):
        await backend.forward_backward_async([], loss_fn="cross_entropy")


def test_smoothing_that_trl_would_leave_out_is_refused() -> None:
    assert LocalDPOConfig(loss_type="robust", label_smoothing=0.1).label_smoothing == 0.1
    with pytest.raises(ValueError, match="robust only"):
        LocalDPOConfig(label_smoothing=0.1)


@pytest.mark.parametrize(
    ("kind", "params", "words"),
    [
        ("local_sft", {"trainer": {"router_aux_loss_coef": 0.1}}, "set reduction: mean"),
        ("local_rl", {"trainer": {"generation_kwargs": {"num_beams": 2}}}, "num_beams cannot be"),
    ],
)
def test_what_would_change_a_number_in_silence_is_refused(
    kind: str, params: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        experiment(kind, tmp_path, **params)


def test_sampling_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    spec = experiment("local_rl", tmp_path, trainer={"generation_kwargs": {"max_tokens": 1}})
    with pytest.raises(UserError, match="GenerationConfig has no max_tokens"):
        spec.algorithm.build()


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("local_sft", {"max_seq_len": 9999}),
        ("local_dpo", {"max_seq_len": 9999}),
        ("local_rl", {"max_tokens": 9999}),
    ],
)
async def test_more_than_the_model_reads_is_refused_by_its_field(
    kind: str, params: dict[str, int], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="is 9999, and the model reads") as refusal:
        await opened(experiment(kind, tmp_path, **params))
    (field,) = params
    assert [problem.where for problem in refusal.value.problems] == [f"algorithm.params.{field}"]
