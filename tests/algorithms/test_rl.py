"""RL: what is refused, what a batch holds, the gradient, and the first step against the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import pytest_asyncio
import tinker
import torch

from algorithms.base import RunContext, TrainingBatch
from algorithms.experiment import Experiment
from algorithms.opening import open_live_run
from algorithms.rewards.advantages import group_advantages
from algorithms.rewards.verifiers import ExactMatch
from algorithms.rl import RL, trained_logprobs
from algorithms.rl_config import PolicyLoss, RLConfig
from algorithms.rollouts.chat import ChatClient
from algorithms.rollouts.examples import scored
from algorithms.rollouts.tools import Tools
from algorithms.rollouts.trajectory import Rollout, Turn, to_datum
from algorithms.run import LiveRun
from backends.base import ModelSpec
from backends.embedded import EmbeddedParams, EngineProcess
from backends.engine.losses import LOSSES
from backends.errors import UserError
from backends.mock import MockTokenizer
from backends.storage.run_store import RunStore
from backends.tinker import TinkerBackend, connect
from tests.algorithms.samples import ECHOES, MODEL, chat, experiment, open_backend, set_up
from tests.algorithms.test_sft import output

LOSS_FNS = get_args(PolicyLoss)
WORDS = [chat(word, word) for word in ["one", "two", "three", "four", "five"]]
KEY = "tml-a-key-of-the-tests"


async def agent(chat: ChatClient, row: dict[str, Any]) -> float:
    """Pays for a word that starts with an o, as the first row's does."""
    answer = await chat.reply([{"role": "user", "content": row["messages"][0]["content"]}])
    return float(answer["content"].startswith("o"))


def not_async(chat: ChatClient, row: dict[str, Any]) -> float:
    """No agent."""
    return 0.0


def spec(rows: list[dict[str, Any]] = WORDS, **params: Any) -> Experiment:
    small = {"batch_size": 2, "num_samples": 4, "max_tokens": 8, "learning_rate": 0.05}
    return experiment(
        data={"kind": "rows", "rows": rows},
        algorithm={"kind": "rl", "params": small | params},
        backend={"kind": "mock"},
    )


async def ready(**params: Any) -> RL:
    given = spec(**params)
    algorithm = await set_up(given, await open_backend(given))
    assert isinstance(algorithm, RL)
    return algorithm


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "params", "says"),
    [
        ("num_samples", {"num_samples": 1}, "take at least 2"),
        ("temperature", {"temperature": 0}, "take 1.0"),
        ("max_turns", {"max_turns": 1, "environment": {"kind": "guess_number"}}, "raise it"),
        ("num_substeps", {"num_substeps": 3}, "a batch has 2 groups"),
        ("loss_fn_config", {"loss_fn_config": {"beta": 1.0}}, "has no such key"),
        ("loss_fn_config", {"loss_fn": "ppo", "loss_fn_config": {"beta": 1}}, "clip_low"),
        ("loss_fn_config", {"loss_fn": "dro", "loss_fn_config": {"beta": -1}}, "from 0 to"),
        ("loss_fn", {"loss_fn": "cross_entropy"}, "importance_sampling"),
        ("advantage", {"advantage": "median"}, "leave_one_out"),
        ("user_template", {"user_template": "Q: {question}"}, "put {prompt} into it"),
        ("agent_import_path", {"agent_import_path": "nowhere:agent"}, "does not import"),
        ("agent_import_path", {"agent_import_path": "agent"}, "module:attribute"),
        ("agent_import_path", {"agent_import_path": f"{__name__}:not_async"}, "async def agent"),
        (
            "agent_import_path",
            {"agent_import_path": f"{__name__}:agent", "environment": {"kind": "guess_number"}},
            "keep one of the two",
        ),
        (
            "system_prompt",
            {"agent_import_path": f"{__name__}:agent", "system_prompt": "Hi."},
            "leave it out",
        ),
        ("environment.kind", {"environment": {"kind": "tolls"}}, "did you mean 'tools'"),
        (
            "environment.params.high",
            {"environment": {"kind": "guess_number", "params": {"low": 3}}},
            "not above low",
        ),
    ],
)
def test_what_can_never_train_is_refused(field: str, params: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as caught:
        spec(**params)
    (problem,) = caught.value.problems
    assert problem.where == f"algorithm.params.{field}"
    assert says in str(problem)


def test_the_losses_are_those_of_the_engine_that_take_advantages() -> None:
    with_advantages = [
        name for name, row in LOSSES.items() if "advantages" in {one.name for one in row.inputs}
    ]
    assert list(LOSS_FNS) == with_advantages


async def test_rows_are_looked_at_before_anything_starts() -> None:
    rows = [WORDS[0], {"messages": [{"role": "user", "content": "no answer"}]}, {"number": 1}]
    given = spec(rows)
    backend = await open_backend(given)
    with pytest.raises(UserError) as caught:
        await set_up(given, backend)
    first, second = caught.value.problems
    assert first.where == "data.rows[1]"
    assert "has no answer to compare with" in first.what
    assert second.where == "data.rows[2]"
    plain = spec([{"prompt": "1+1=", "completion": "2"}], system_prompt="Hi.", batch_size=1)
    with pytest.raises(UserError, match="takes no system_prompt"):
        await set_up(plain, backend)


async def test_an_environment_with_a_reward_of_its_own_asks_nothing_for_the_verifier() -> None:
    params = {"environment": {"kind": "guess_number"}, "batch_size": 1}
    given = spec([{"number": 1}], **params)
    algorithm = await set_up(given, await open_backend(given))
    assert algorithm.setup_metrics() == {"data/rows": 1.0, "data/rows_skipped": 0.0}


async def test_an_agent_may_take_any_row() -> None:
    given = spec([{"ask": "a"}], agent_import_path=f"{__name__}:agent", batch_size=1)
    algorithm = await set_up(given, await open_backend(given))
    assert algorithm.setup_metrics() == {"data/rows": 1.0, "data/rows_skipped": 0.0}


async def test_bad_rows_are_left_out_as_far_as_the_data_allows() -> None:
    given = spec([*WORDS, {"number": 1}])
    allowed = given.data.model_copy(update={"max_bad_rows": 1})
    algorithm = await set_up(given.model_copy(update={"data": allowed}), await open_backend(given))
    assert algorithm.setup_metrics() == {"data/rows": 5.0, "data/rows_skipped": 1.0}


def test_the_code_that_decides_the_batches_is_known() -> None:
    led = spec(agent_import_path=f"{__name__}:agent").algorithm.build()
    assert isinstance(led, RL)
    assert [agent, ExactMatch] == [led.code()[1], type(led.code()[2])]
    tools = spec(environment={"kind": "tools", "params": {"tools": [f"{__name__}:not_async"]}})
    played = tools.algorithm.build()
    assert isinstance(played, RL)
    assert played.code()[1:3] == [Tools, not_async]


# --- what a batch holds -------------------------------------------------------------------------


async def test_a_batch_compares_the_rollouts_of_a_group() -> None:
    algorithm = await ready()
    batch = await algorithm.build_batch(0)
    assert (batch.loss_fn, batch.loss_fn_config) == ("importance_sampling", None)
    assert batch.metrics["reward/n_groups"] == 2
    assert batch.metrics["reward/n_trajectories"] == 8
    mixed = [
        group
        for group in ([t for t in batch.transcripts if t.group == g] for g in (0, 1))
        if len({one.reward for one in group}) > 1
    ]
    assert mixed, "the mock mishears half of the time"
    assert len(batch.data) == 4 * len(mixed)
    for group in mixed:
        mean = sum(one.reward for one in group) / 4
        assert [one.advantage for one in group] == [one.reward - mean for one in group]
        assert group[0].messages[0]["role"] == "user"
        assert {one.end for one in group} == {"stop"}
    for datum in batch.data:
        inputs = {name: tensor.to_numpy() for name, tensor in datum.loss_fn_inputs.items()}
        heard = inputs["advantages"] != 0
        assert heard.any()
        assert len(set(inputs["advantages"][heard])) == 1
        assert (inputs["logprobs"][heard] < 0).all()
        assert (inputs["logprobs"][~heard] == 0).all()
        end = MockTokenizer.eos_token_id
        assert inputs["target_tokens"][-1] == end


async def test_constant_groups_and_transcripts_are_left_out_by_choice() -> None:
    rows = [chat("word", "never said")] * 2
    given = spec(rows, log_rollouts=3)
    empty = await (await set_up(given, await open_backend(given))).build_batch(0)
    assert empty.data == []
    assert empty.metrics["reward/groups_all_bad"] == 1.0
    assert [one.advantage for one in empty.transcripts] == [None] * 3
    kept = spec(rows, drop_constant_reward=False)
    assert len((await (await set_up(kept, await open_backend(kept))).build_batch(0)).data) == 8


async def test_substeps_share_one_batch_of_rollouts() -> None:
    whole = await (await ready(batch_size=4)).build_batch(0)
    algorithm = await ready(batch_size=4, num_substeps=2)
    assert algorithm.steps_per_epoch == 4  # 5 rows, 4 at a time, 2 steps each
    rolled = 0
    runs = algorithm._runner.run

    async def run(*args: Any) -> Any:
        nonlocal rolled
        rolled += 1
        return await runs(*args)

    algorithm._runner.run = run  # type: ignore[method-assign]
    parts = await asyncio.gather(algorithm.build_batch(0), algorithm.build_batch(1))
    assert rolled == 1
    assert [one.metrics["reward/n_groups"] for one in parts] == [2.0, 2.0]
    together = [datum.model_input.to_ints() for part in parts for datum in part.data]
    assert together == [datum.model_input.to_ints() for datum in whole.data]
    # By itself, in another process, the second part is the same again.
    alone = await (await ready(batch_size=4, num_substeps=2)).build_batch(1)
    assert [d.model_input.to_ints() for d in alone.data] == [
        d.model_input.to_ints() for d in parts[1].data
    ]
    last = [await algorithm.build_batch(step) for step in (2, 3)]  # one row is left over
    assert [one.metrics.get("reward/n_groups") for one in last] == [None, 1.0]


def test_staleness_is_counted_in_batches() -> None:
    def after(**params: Any) -> list[int]:
        algorithm = RL(RLConfig.model_validate(params))
        return [algorithm.sampled_after(step) for step in range(8)]

    assert after() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert after(max_staleness=2) == [0, 0, 0, 1, 2, 3, 4, 5]
    assert after(num_substeps=2) == [0, 0, 2, 2, 4, 4, 6, 6]
    assert after(num_substeps=2, max_staleness=1) == [0, 0, 0, 0, 2, 2, 4, 4]


async def test_the_base_and_the_sampler_are_asked_where_they_are_needed() -> None:
    plain = await (await ready()).build_batch(0)
    held = await (await ready(kl_penalty_coef=0.5, loss_fn="dro")).build_batch(0)
    # Untrained weights are the base: the penalty is nothing, and every token has its logprob.
    assert held.metrics["kl/base"] == pytest.approx(0, abs=1e-7)
    assert "kl/base" not in plain.metrics
    for one, other in zip(plain.data, held.data, strict=True):
        advantages = [datum.loss_fn_inputs["advantages"].to_numpy() for datum in (one, other)]
        np.testing.assert_allclose(advantages[0], advantages[1], atol=1e-7)
        assert (other.loss_fn_inputs["logprobs"].to_numpy() < 0).all()


async def test_an_agent_is_trained() -> None:
    batch = await (await ready(agent_import_path=f"{__name__}:agent")).build_batch(0)
    assert batch.metrics["rollout/turns"] == 1.0
    rewards = {(t.messages[-1]["content"][0] == "o", t.reward) for t in batch.transcripts}
    assert rewards <= {(True, 1.0), (False, 0.0)}


# --- runs ---------------------------------------------------------------------------------------


async def whole_run(folder: Path, stops: list[int], **params: Any) -> list[dict[str, float]]:
    """The metrics of a run that is stopped and taken up again after each of some steps."""
    given = spec(ECHOES + WORDS, max_steps=6, **params).model_copy(update={"store": str(folder)})
    for start, stop in zip([0, *stops], [*stops, 6], strict=True):
        run = await open_live_run(given, RunStore(folder, "a"))
        assert run.plan.first_step == start
        await run.run_segment(run, start, stop)
        await run.settle()
        await run.cancel()
        await run.backend.aclose()
    rows = run.store.metrics()
    return [
        {name: value for name, value in row.items() if not name.startswith("time/")} for row in rows
    ]


@pytest.mark.parametrize(
    ("params", "stop"),
    [({"max_staleness": 1}, 3), ({"num_substeps": 2, "max_staleness": 1}, 3)],
)
async def test_a_run_that_is_taken_up_again_is_the_run_that_was_never_stopped(
    tmp_path: Path, params: dict[str, Any], stop: int
) -> None:
    whole = await whole_run(tmp_path / "whole", [], **params)
    assert await whole_run(tmp_path / "stopped", [stop], **params) == whole
    stale = [row["sampling/staleness"] for row in whole]
    batches = [step // params.get("num_substeps", 1) for step in range(6)]
    assert stale == [float(min(1, batch)) for batch in batches]


async def test_transcripts_are_kept_of_each_step(tmp_path: Path) -> None:
    await whole_run(tmp_path, [])
    store = RunStore(tmp_path, "a")
    assert store.rollout_steps() == [1, 2, 3, 4, 5, 6]
    assert set(store.rollouts(1)[0]) == {"group", "messages", "reward", "advantage", "end"}


async def test_a_run_that_can_not_learn_fails(tmp_path: Path) -> None:
    given = spec([chat("word", "never said")], batch_size=1, max_steps=2)
    run: LiveRun = await open_live_run(given, RunStore(tmp_path, "a"))
    with pytest.raises(UserError, match="none of the 2 batches held anything to train on"):
        await run.run_segment(run, 0, 2)
    await run.cancel()


# --- numbers ------------------------------------------------------------------------------------


def test_step_metrics_by_hand() -> None:
    def datum(logprobs: list[float], advantages: list[float]) -> tinker.Datum:
        tokens = np.arange(len(logprobs))
        return tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens.tolist()),
            loss_fn_inputs={
                "target_tokens": tinker.TensorData.from_numpy(tokens),
                "logprobs": tinker.TensorData.from_numpy(np.asarray(logprobs, np.float32)),
                "advantages": tinker.TensorData.from_numpy(np.asarray(advantages, np.float32)),
            },
        )

    batch = TrainingBatch([datum([0, -1, -2], [0, 1, 1]), datum([0, -4], [0, -1])], "ppo")
    result = output([-9, -1.5, -1.5], [-9, -4.25])
    result.metrics["loss:sum"] = 1.5
    metrics = RL(RLConfig()).step_metrics(0, batch, result)
    ratios = np.exp([-0.5, 0.5, -0.25])
    assert metrics == {
        "tokens/total": 5.0,
        "tokens/trained": 3.0,
        "sampling/kl": pytest.approx(0.25 / 3),
        "sampling/ratio_mean": pytest.approx(ratios.mean()),
        "sampling/ratio_max": pytest.approx(ratios.max()),
        "loss": 0.5,
    }
    silent = TrainingBatch([datum([0, -1], [0, 0])], "ppo")
    assert RL(RLConfig()).step_metrics(0, silent, output([-9, -1])) == {
        "tokens/total": 2.0,
        "tokens/trained": 0.0,
    }


@pytest.mark.parametrize("loss_fn", LOSS_FNS)
@pytest.mark.parametrize(("kind", "factor"), [("mean", 2.0), ("leave_one_out", 3.0)])
def test_the_gradient_of_a_two_token_problem_is_the_policy_gradient(
    loss_fn: str, kind: Any, factor: float
) -> None:
    """The mean over all groups of three, weighted by their chances, against the gradient by hand.

    The policy says token 0 or 1 with softmax(theta); they earn r_0 and r_1, J is the mean reward,
    dJ/dtheta_0 = p_0 p_1 (r_0 - r_1). A group of S with A_i = r_i - the mean of the others is an
    unbiased estimate of S * dJ/dtheta; centred on the mean of all, (S - 1) of it.
    """
    theta = torch.tensor([0.3, -0.4], dtype=torch.float64)
    rewards, size = (1.0, 0.25), 3
    logprobs = theta.log_softmax(0)
    gradient = torch.zeros(2, dtype=torch.float64)
    for group in product((0, 1), repeat=size):
        chance = float(logprobs[list(group)].sum().exp())
        rollouts = [
            Rollout(0, [Turn([0], [token], [float(logprobs[token])], False)], [], rewards[token],
                    "stop", {}, 0)
            for token in group
        ]  # fmt: skip
        for one in scored(rollouts, kind, drop_constant=True):
            for example in one.examples():
                datum = to_datum(example.segment, example.advantages)
                gradient -= chance * _gradient(loss_fn, datum, theta)
    p_0, p_1 = logprobs.exp().tolist()
    expected = factor * p_0 * p_1 * (rewards[0] - rewards[1])
    # The datum's logprobs and advantages are float32, as they go over the wire.
    assert gradient.tolist() == pytest.approx([expected, -expected], rel=1e-6)


def _gradient(loss_fn: str, datum: tinker.Datum, theta: torch.Tensor) -> torch.Tensor:
    """d loss / d theta, by the engine's own formula."""
    variable = theta.clone().requires_grad_()
    arrays = {name: value.to_numpy() for name, value in datum.loss_fn_inputs.items()}
    targets = torch.from_numpy(arrays.pop("target_tokens"))
    inputs = {name: torch.from_numpy(value).double() for name, value in arrays.items()}
    row = LOSSES[loss_fn]
    loss = row.formula(variable.log_softmax(0)[targets], inputs, row.settings({}))
    (slope,) = torch.autograd.grad(loss, variable)
    return slope


def test_groups_of_three_centred_by_hand() -> None:
    assert group_advantages([1.0, 0.25, 0.25], "mean") == [0.5, -0.25, -0.25]


async def test_ratios_of_the_same_weights_are_exactly_one() -> None:
    given = spec()
    backend = await open_backend(given)
    algorithm = await set_up(given, backend)
    batch = await algorithm.build_batch(0)
    passed = await backend.forward_backward_async(batch.data, loss_fn=str(batch.loss_fn))
    metrics = algorithm.step_metrics(0, batch, passed)
    assert (metrics["sampling/ratio_mean"], metrics["sampling/ratio_max"]) == (1.0, 1.0)
    assert metrics["sampling/kl"] == 0.0


# --- against the engine -------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[EngineProcess]:
    engine = await EngineProcess.start(EmbeddedParams(threads=1), str(MODEL), KEY)
    yield engine
    await engine.stop()


@pytest.mark.asyncio(loop_scope="module")
async def test_ratios_are_one_on_the_first_on_policy_step(engine: EngineProcess) -> None:
    """To float32's rounding: the sampler computes token by token with a cache, the trainer whole
    rows, so that sums are added up in another order. The largest difference seen was 1.5e-6 nats.
    """
    rows = [chat(f"What is {n} + {n + 5}?", str(2 * n + 5)) for n in range(21, 29)]
    given = spec(rows, batch_size=8, num_samples=8, drop_constant_reward=False)
    backend = await connect(
        TinkerBackend, engine.url, KEY, ModelSpec(name=str(MODEL), lora_rank=4, seed=3), None
    )
    algorithm = given.algorithm.build()
    tokenizer = backend.get_tokenizer()
    dataset = given.data.load()
    context = RunContext("run", "runs/run", given, dataset, backend, tokenizer)
    await algorithm.setup(context, backend)
    first = await algorithm.build_batch(0)
    again = await algorithm.build_batch(0)
    assert first.metrics == again.metrics
    passed = await backend.forward_backward_async(first.data, loss_fn=str(first.loss_fn))
    p_T, q_T = trained_logprobs(first, passed)
    assert len(p_T) > 100
    assert np.abs(p_T - q_T).max() < 1e-5
    metrics = algorithm.step_metrics(0, first, passed)
    assert metrics["sampling/ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["sampling/kl"] == pytest.approx(0, abs=1e-6)
    # Whole conversations, as the template writes them.
    text = tokenizer.decode(first.data[0].model_input.to_ints())
    assert text.startswith("<|im_start|>user\nWhat is ")
    await backend.aclose()
