"""DPO: the loss against TRL's and by hand, what a batch holds, and learning on a real engine."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tinker
import torch
import yaml

from algorithms.base import TrainingBatch
from algorithms.dpo import (
    DPO,
    LOSS_TYPES,
    DPOConfig,
    LossType,
    PairScores,
    dpo_loss,
    pair_losses,
    pair_scores,
)
from algorithms.experiment import parse_experiment
from algorithms.kept import encode_batch
from backends.base import ModelOutput, ModelSpec, SavedState
from backends.embedded import EmbeddedKind, EmbeddedParams
from backends.errors import UserError
from backends.mock import MockBackend, MockSamplingClient, MockState
from tests.algorithms.samples import MODEL, experiment, open_backend, set_up, train

EXAMPLE = Path(__file__).parents[2] / "examples/data/arithmetic/preferences_test.jsonl"
PAIRS = [
    {"prompt": f"say {word}: ", "chosen": word, "rejected": f"it is {word}"}
    for word in ("one", "two", "three", "four", "five")
]


def dpo(
    rows: list[dict[str, Any]] = PAIRS, data: dict[str, Any] | None = None, **params: Any
) -> Any:
    """A mock experiment."""
    return experiment(
        data=data or {"kind": "rows", "rows": rows},
        algorithm={"kind": "dpo", "params": {"batch_size": 2, **params}},
        backend={"kind": "mock"},
    )


def datum(weights: list[float], reference: list[float]) -> tinker.Datum:
    arrays = {
        "target_tokens": np.arange(len(weights)),
        "weights": np.asarray(weights, np.float32),
        "reference_logprobs": np.asarray(reference, np.float32),
    }
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(list(range(len(weights)))),
        loss_fn_inputs={k: tinker.TensorData.from_numpy(v) for k, v in arrays.items()},
    )


# --- the loss ------------------------------------------------------------------------------------


class Case:
    """Three pairs of ragged answers behind ragged prompts, with random logprobs."""

    lengths = (9, 7, 12, 5, 6, 11)  # positions N of chosen and rejected answers in turn
    prompts = (4, 4, 7, 2, 3, 3)  # positions that do not count

    def __init__(self, pairs: int = 3) -> None:
        noise = np.random.default_rng(5)
        self.lengths, self.prompts = self.lengths[: 2 * pairs], self.prompts[: 2 * pairs]
        self.policy = [-3 * noise.random(n, np.float32) for n in self.lengths]
        reference = [-3 * noise.random(n, np.float32) for n in self.lengths]
        self.data = [
            datum([0.0] * p + [1.0] * (n - p), r.tolist())
            for p, n, r in zip(self.prompts, self.lengths, reference, strict=True)
        ]
        self.reference = [
            r[p:].astype(np.float64).sum() for r, p in zip(reference, self.prompts, strict=True)
        ]

    def ours(self, loss_type: LossType, **settings: float) -> tuple[float, list[torch.Tensor]]:
        """The loss, and its gradient with respect to each answer's logprobs."""
        logprobs = [torch.from_numpy(p).double().requires_grad_(True) for p in self.policy]
        loss = dpo_loss(ModelOutput(logprobs), self.data, loss_type=loss_type, **settings)
        loss.backward()
        return loss.item(), [p.grad for p in logprobs if p.grad is not None]

    def theirs(self, loss_type: str, **settings: float) -> tuple[float, list[torch.Tensor]]:
        """The same by the code of TRL's trainer, which has all chosen answers first."""
        from trl.trainer.dpo_trainer import DPOTrainer

        order = [*range(0, len(self.data), 2), *range(1, len(self.data), 2)]
        longest = max(self.lengths)
        logprobs = torch.zeros(len(order), longest, dtype=torch.float64)
        mask = torch.zeros(len(order), longest + 1, dtype=torch.long)
        for place, index in enumerate(order):
            logprobs[place, : self.lengths[index]] = torch.from_numpy(self.policy[index])
            mask[place, self.prompts[index] + 1 : self.lengths[index] + 1] = 1
        logprobs.requires_grad_(True)
        counted = logprobs * mask[:, 1:]
        zeros = torch.zeros_like(logprobs)
        outputs = SimpleNamespace(
            log_probs=counted, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
        )

        class Model:
            training = True

            def __call__(self, **inputs: Any) -> SimpleNamespace:
                return outputs

        model = Model()
        trainer = SimpleNamespace(
            model=model,
            accelerator=SimpleNamespace(
                device="cpu", gather_for_metrics=lambda x: x, gather=lambda x: x
            ),
            aux_loss_enabled=False,
            ld_alpha=None,
            precompute_ref_logps=True,
            f_divergence_type="reverse_kl",
            loss_types=[loss_type],
            loss_weights=[1.0],
            use_weighting=False,
            _metrics={"train": defaultdict(list)},
            _total_train_tokens=0,
            _tp_size=1,
            **settings,
        )
        reference = torch.tensor([self.reference[index] for index in order], dtype=torch.float64)
        chosen, rejected = reference.chunk(2)
        inputs = {
            "input_ids": torch.ones_like(mask),
            "attention_mask": torch.ones_like(mask),
            "completion_mask": mask,
            "ref_chosen_logps": chosen,
            "ref_rejected_logps": rejected,
        }
        loss = DPOTrainer._compute_loss(trainer, model, inputs, False)
        loss.backward()
        grad = logprobs.grad
        assert grad is not None
        back = [order.index(index) for index in range(len(order))]
        rows = [grad[place, : self.lengths[index]] for index, place in enumerate(back)]
        return loss.item(), rows


@pytest.mark.parametrize(
    ("loss_type", "label_smoothing", "pairs", "their_name"),
    [
        ("sigmoid", 0.0, 3, "sigmoid"),
        ("sigmoid_norm", 0.0, 3, "sigmoid_norm"),
        ("ipo", 0.0, 3, "ipo"),
        ("robust", 0.2, 3, "robust"),
        ("sigmoid", 0.2, 1, "aot"),  # of one pair, TRL's name for the smoothed loss
    ],
)
@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_value_and_gradient_are_those_of_trl(
    loss_type: LossType, label_smoothing: float, pairs: int, their_name: str, beta: float
) -> None:
    case = Case(pairs)
    settings = {"beta": beta, "label_smoothing": label_smoothing}
    value, gradient = case.ours(loss_type, **settings)
    their_value, their_gradient = case.theirs(their_name, **settings)
    assert value == pytest.approx(their_value, abs=1e-9)
    for ours, theirs in zip(gradient, their_gradient, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)


def test_the_losses_by_hand() -> None:
    tokens = torch.tensor([2.0, 4.0], dtype=torch.float64)
    scores = PairScores(
        *(torch.tensor([s], dtype=torch.float64) for s in (0.6, -0.8)), *tokens[:, None]
    )
    margin, per_token = 1.4, 0.3 + 0.2

    def logsigmoid(x: float) -> float:
        return -math.log1p(math.exp(-x))

    want: dict[LossType, float] = {
        "sigmoid": -0.9 * logsigmoid(0.5 * margin) - 0.1 * logsigmoid(-0.5 * margin),
        "sigmoid_norm": -0.9 * logsigmoid(0.5 * per_token) - 0.1 * logsigmoid(-0.5 * per_token),
        "robust": (-0.9 * logsigmoid(0.5 * margin) + 0.1 * logsigmoid(-0.5 * margin)) / 0.8,
        "ipo": (per_token - 1.0) ** 2,
    }
    for loss_type, value in want.items():
        assert pair_losses(scores, loss_type, 0.5, 0.1).item() == pytest.approx(value, abs=1e-12)


def test_only_the_answers_count() -> None:
    data = [datum([0, 1, 1], [-9, -1, -2]), datum([0, 0, 1], [-9, -9, -3])]
    logprobs = [
        torch.tensor([-5.0, -0.5, -1.0], requires_grad=True),
        torch.tensor([-5.0, -7.0, -3.5], requires_grad=True),
    ]
    scores = pair_scores(logprobs, data)
    assert (scores.chosen.item(), scores.rejected.item()) == (1.5, -0.5)
    assert (scores.chosen_tokens.item(), scores.rejected_tokens.item()) == (2.0, 1.0)
    dpo_loss(
        ModelOutput(logprobs), data, loss_type="sigmoid", beta=0.1, label_smoothing=0
    ).backward()
    slope = -0.1 / (1 + math.exp(0.1 * 2.0))
    np.testing.assert_allclose(logprobs[0].grad, [0, slope, slope], rtol=1e-6)
    np.testing.assert_allclose(logprobs[1].grad, [0, 0, -slope], rtol=1e-6)


def test_the_metrics_by_hand() -> None:
    data = [
        datum([0, 1, 1], [-9, -1, -2]),
        datum([0, 0, 1], [-9, -9, -3]),
        datum([0, 1], [-9, -1]),
        datum([0, 1], [-9, -1]),
    ]
    logprobs = [[-5, -0.5, -1], [-5, -7, -3.5], [-4, -2], [-4, -1]]
    result = tinker.types.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord",
        loss_fn_outputs=[
            {"logprobs": tinker.TensorData.from_numpy(np.asarray(p, np.float32))} for p in logprobs
        ],
        metrics={"loss:sum": 0.25},
    )
    metrics = DPO(DPOConfig(beta=0.1)).step_metrics(0, TrainingBatch(data, "unused"), result)
    # scores 1.5 and -0.5, -1 and 0
    assert metrics == pytest.approx(
        {
            "loss": 0.25,
            "dpo/accuracy": 0.5,
            "dpo/margin": 0.1 * (2.0 - 1.0) / 2,
            "rewards/chosen": 0.1 * 0.25,
            "rewards/rejected": 0.1 * -0.25,
            "tokens/supervised": 5.0,
            "tokens/total": 10.0,
        }
    )


def test_the_page_names_every_loss_type() -> None:
    page = (Path(__file__).parents[2] / "docs/preferences.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == ["loss_type", *LOSS_TYPES]
    params = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    spec = parse_experiment({"name": "n", "model": {"name": str(MODEL)}, **params})
    assert isinstance(spec.algorithm.params, DPOConfig)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"beta": 0}, "beta"),
        ({"loss_type": "hinge"}, "loss_type"),
        ({"label_smoothing": 0.5}, "label_smoothing"),
        ({"loss_type": "ipo", "label_smoothing": 0.1}, "label_smoothing"),
        ({"max_seq_len": 1}, "max_seq_len"),
    ],
)
def test_what_cannot_train_is_refused_with_its_field(params: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError) as refused:
        dpo(**params)
    assert [p.where for p in refused.value.problems] == [f"algorithm.params.{field}"]


async def test_rows_that_are_no_pairs_are_named_or_skipped() -> None:
    bad = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "chosen": "b", "rejected": "b"}]
    spec = dpo([*PAIRS, *bad])
    with pytest.raises(UserError, match="neither is better") as refused:
        await set_up(spec, await open_backend(spec))
    assert [p.where for p in refused.value.problems] == ["data.rows[5]", "data.rows[6]"]
    spec = dpo(data={"kind": "rows", "rows": [*PAIRS, *bad], "max_bad_rows": 2})
    metrics = (await set_up(spec, await open_backend(spec))).setup_metrics()
    assert (metrics["data/rows"], metrics["data/rows_skipped"]) == (5.0, 2.0)


# --- batches -------------------------------------------------------------------------------------


def texts(batch: TrainingBatch) -> list[bytes]:
    """What each datum's model reads and says, without the end of the text."""
    return [bytes(datum.model_input.to_ints()) for datum in batch.data]


async def test_a_batch_is_chosen_and_rejected_answers_in_turn() -> None:
    spec = dpo()
    algorithm = await set_up(spec, await open_backend(spec))
    built = [await algorithm.build_batch(step) for step in range(3)]
    assert [len(batch.data) for batch in built] == [4, 4, 2]
    seen = [text for batch in built for text in texts(batch)]
    assert sorted(seen[::2]) == sorted(f"say {p['chosen']}: {p['chosen']}".encode() for p in PAIRS)
    for chosen, rejected in zip(seen[::2], seen[1::2], strict=True):
        word = chosen.partition(b": ")[2]
        assert rejected == b"say " + word + b": it is " + word
    for datum in built[0].data:
        prompt = bytes(datum.model_input.to_ints()).index(b": ") + 2
        weights = datum.loss_fn_inputs["weights"].to_numpy()
        assert np.flatnonzero(weights).tolist() == list(range(prompt - 1, len(weights)))


async def test_turns_are_rendered_behind_the_prompt_that_both_share() -> None:
    ask, good, bad = (
        {"role": role, "content": text}
        for role, text in (("user", "1+1?"), ("assistant", "2"), ("assistant", "3"))
    )
    shapes = [
        {"prompt": [ask], "chosen": [good], "rejected": [bad]},
        {"chosen": [ask, good], "rejected": [ask, bad]},
    ]
    spec = dpo(shapes)
    backend = await open_backend(spec)
    batch = await (await set_up(spec, backend)).build_batch(0)
    decode = backend.get_tokenizer().decode
    said = []
    for datum in batch.data:
        weights = datum.loss_fn_inputs["weights"].to_numpy() > 0
        said.append(decode(datum.loss_fn_inputs["target_tokens"].to_numpy()[weights].tolist()))
    assert said == ["2<|im_end|>", "3<|im_end|>"] * 2


async def test_the_reference_is_the_model_as_the_run_started(tmp_path: Path) -> None:
    spec = dpo(max_steps=4, learning_rate=0.1)
    backend = await open_backend(spec)
    await train(spec, backend)
    tuned, fresh = backend._state, MockState.fresh(0)
    batch = await (await set_up(spec, backend)).build_batch(0)
    assert reference_of(batch) == expected(fresh, batch) != expected(tuned, batch)
    await backend.export_state(await backend.save_full_state("x"), tmp_path)
    begun = parse_experiment(
        spec.model_dump(mode="json") | {"model": {"name": "mock", "init_from": str(tmp_path)}}
    )
    batch = await (await set_up(begun, backend)).build_batch(0)
    assert reference_of(batch) == expected(tuned, batch)


def reference_of(batch: TrainingBatch) -> list[list[float]]:
    return [d.loss_fn_inputs["reference_logprobs"].to_numpy().tolist() for d in batch.data]


def expected(state: MockState, batch: TrainingBatch) -> list[list[float]]:
    targets = [d.loss_fn_inputs["target_tokens"].to_numpy() for d in batch.data]
    return [state.logprobs(each).astype(np.float32).tolist() for each in targets]


async def test_the_reference_is_asked_once_for_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = MockSamplingClient.sample

    def sample(self: MockSamplingClient, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(prompt.length)
        return real(self, prompt, *args, **kwargs)

    monkeypatch.setattr(MockSamplingClient, "sample", sample)
    spec = dpo(num_epochs=3)
    algorithm = await set_up(spec, await open_backend(spec))
    for step in range(9):
        assert await algorithm.build_batch(step)
    assert len(asked) == 2 * len(PAIRS)


async def test_rows_on_disk_give_the_same_batches(tmp_path: Path) -> None:
    lines = EXAMPLE.read_text().splitlines()[:7]
    (tmp_path / "pairs.jsonl").write_text("".join(f"{line}\n" for line in lines))
    built = []
    for streaming in (False, True):
        data = {"kind": "jsonl", "path": str(tmp_path / "pairs.jsonl"), "streaming": streaming}
        algorithm = await set_up(spec := dpo(data=data, num_epochs=2), await open_backend(spec))
        batches = [await algorithm.build_batch(step) for step in range(8)]
        for batch in batches:
            batch.loss_fn = "dpo"  # a callable has no bits
        built.append([encode_batch(batch) for batch in batches])
    assert built[0] == built[1]


async def test_a_pair_is_dropped_when_one_answer_has_no_token_left() -> None:
    rows = [
        {"prompt": "x" * 20, "chosen": "a", "rejected": "b"},
        {"prompt": "short", "chosen": "a", "rejected": "b" * 40},
        {"chosen": [{"role": "user", "content": "y" * 60}, *PAIR_TURNS[0]],
         "rejected": [{"role": "user", "content": "y" * 60}, *PAIR_TURNS[1]]},
    ]  # fmt: skip
    spec = dpo(rows, max_seq_len=30)
    metrics = (await set_up(spec, await open_backend(spec))).setup_metrics()
    assert metrics["data/rows"] == 2
    assert metrics["data/rows_dropped"] == 1
    assert metrics["data/rows_cut"] == 1
    assert metrics["data/tokens"] == (20 + 2) * 2 + (5 + 2) + 30


PAIR_TURNS = [[{"role": "assistant", "content": text}] for text in ("a", "b")]


# --- training ------------------------------------------------------------------------------------


async def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    spec = dpo(max_steps=8, learning_rate=0.05, loss_type="ipo")
    whole = await train(spec, await open_backend(spec))
    first = await open_backend(spec)
    begun = await train(spec, first, last=3)
    await first.export_state(await first.save_full_state("x"), tmp_path)
    second = await open_backend(spec, SavedState(None, tmp_path))
    assert begun + await train(spec, second, first=3) == whole
    assert isinstance(second, MockBackend)


async def test_it_learns_on_a_real_engine() -> None:
    """Every number through the SDK and the engine: the policy starts as its own reference."""
    spec = experiment(
        model={"name": str(MODEL)},
        data={
            "kind": "jsonl",
            "path": str(EXAMPLE),
            "transforms": [{"kind": "limit", "params": {"rows": 8}}],
        },
        algorithm={
            "kind": "dpo",
            "params": {"batch_size": 4, "max_steps": 6, "learning_rate": 5e-3},
        },
        backend={"kind": "embedded"},
    )
    model = ModelSpec(name=str(MODEL), lora_rank=4, seed=0)
    backend = await EmbeddedKind.open(EmbeddedParams(threads=1), model, None)
    try:
        algorithm: Any = await set_up(spec, backend)  # type: ignore[arg-type]
        first = reference_of(await algorithm.build_batch(0))
        rows = []
        for step in range(6):
            batch = await algorithm.build_batch(step)
            passed = backend.forward_backward_custom_async(batch.data, batch.loss_fn)
            stepped = backend.optim_step_async(algorithm.adam_params(step))
            rows.append(algorithm.step_metrics(step, batch, await passed))
            await stepped
        again: Any = await set_up(spec, backend)  # type: ignore[arg-type]
        assert reference_of(await again.build_batch(0)) == first  # to the last bit, after training
    finally:
        await backend.aclose()
    assert abs(rows[0]["dpo/margin"]) < 1e-5
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert rows[-1]["dpo/accuracy"] == 1.0
    assert rows[-1]["dpo/margin"] > 0.5
