"""One step of each kind of distillation on a real engine, against transformers and PEFT.

Student and teacher are two adapters of the tiny model; the reference computes both distributions
over the whole vocabulary, and each loss from its definition.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import tinker
import torch

from algorithms.base import RunContext, TrainingBatch
from algorithms.data.dataset import Dataset
from algorithms.distilling import Distilling
from algorithms.experiment import parse_experiment
from backends.base import Backend, ModelSpec
from backends.embedded import EmbeddedKind, EmbeddedParams
from tests.algorithms.samples import MODEL

DATA = Path(__file__).parents[2] / "examples" / "data" / "arithmetic" / "train.jsonl"
ROWS = [json.loads(line) for line in DATA.read_text().splitlines()[:4]]
TOPK = 8

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True)
class Scene:
    """The backend, whose weights are the student's, and the adapters as files."""

    backend: Backend
    student: Path
    teacher: Path


async def train(backend: Backend, steps: int) -> None:
    """Some steps on arbitrary tokens: any weights will do, so long as they are not the base."""
    from tinker import types as tinker_types

    for step in range(steps):
        tokens = np.random.default_rng(step).integers(0, 400, 12)
        datum = tinker.Datum(
            model_input=tinker_types.ModelInput.from_ints(tokens[:-1].tolist()),
            loss_fn_inputs={
                "target_tokens": tokens[1:],
                "weights": np.ones(len(tokens) - 1, np.float32),
            },
        )
        passed = backend.forward_backward_async([datum], loss_fn="cross_entropy")
        await backend.optim_step_async(tinker_types.AdamParams(learning_rate=3e-3))
        await passed


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    spec = ModelSpec(name=str(MODEL), lora_rank=4, seed=1)
    backend = await EmbeddedKind.open(EmbeddedParams(threads=1), spec, None)
    folders = []
    for name in ("teacher", "student"):
        await train(backend, 2)
        folders.append(tmp_path_factory.mktemp(name))
        await backend.export_state(await backend.save_full_state(name), folders[-1])
    yield Scene(backend, folders[1], folders[0])
    await backend.aclose()


async def algorithm(scene: Scene, kind: str, **params: Any) -> Distilling:
    """The algorithm, set up on the scene's backend."""
    shared = {"batch_size": 2, "num_samples": 2, "max_tokens": 8, "lora_rank": 4}
    spec = parse_experiment(
        {
            "name": "one-step",
            "model": {"name": str(MODEL), "init_from": str(scene.teacher)},
            "data": {"kind": "rows", "rows": ROWS},
            "algorithm": {"kind": kind, "params": {**shared, **params}},
        }
    )
    made = spec.algorithm.build()
    tokenizer = scene.backend.get_tokenizer()
    dataset: Dataset = spec.data.load()
    context = RunContext("run", "unused", spec, dataset, scene.backend, tokenizer)
    await made.setup(context, scene.backend)
    assert isinstance(made, Distilling)
    return made


@cache
def reference(adapter: Path) -> Any:
    """The model with an adapter, by transformers and PEFT."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(str(MODEL), dtype=torch.float32)
    return PeftModel.from_pretrained(base, str(adapter))


def full_logprobs(adapter: Path, tokens: list[int]) -> torch.Tensor:
    """log-probabilities [len(tokens), V] of what follows each token."""
    with torch.no_grad():
        logits = reference(adapter)(torch.tensor([tokens])).logits[0]
    return torch.log_softmax(logits.double(), -1)


@dataclass(frozen=True)
class Row:
    """At each token of an answer the student's and the teacher's logprobs, [T, V] each."""

    answer: list[int]
    student: torch.Tensor
    teacher: torch.Tensor


def rows_of(scene: Scene, made: Distilling, batch: TrainingBatch) -> list[Row]:
    """The reference for every datum of a batch."""
    rows = []
    for datum in batch.data:
        inputs = datum.model_input.to_ints()
        (question,) = [q for q in made._questions if inputs[: len(q.prompt)] == q.prompt]
        targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
        start = len(question.prompt)
        # The last token is a target only; soft targets do not name it, so it is left off there.
        answer = inputs[start:] + ([int(targets[-1])] if targets.ndim == 1 else [])
        student = full_logprobs(scene.student, question.prompt + answer)
        teacher = full_logprobs(scene.teacher, question.teacher_prompt + answer)
        student, teacher = student[start - 1 :], teacher[len(question.teacher_prompt) - 1 :]
        if targets.ndim == 1:
            student, teacher = student[:-1], teacher[:-1]
        rows.append(Row(answer, student, teacher))
    return rows


async def loss_of(scene: Scene, batch: TrainingBatch) -> Any:
    """The engine's result for the batch; its gradients are dropped by a step that moves nothing."""
    if callable(batch.loss_fn):
        passed = scene.backend.forward_backward_custom_async(batch.data, batch.loss_fn)
    else:
        passed = scene.backend.forward_backward_async(batch.data, loss_fn=batch.loss_fn)
    still = tinker.types.AdamParams(learning_rate=0.0)
    await scene.backend.optim_step_async(still)
    return await passed


@pytest.mark.parametrize("skip", [0, 2])
async def test_forward_kl(scene: Scene, skip: int) -> None:
    made = await algorithm(scene, "sdft", topk=TOPK, skip_first_n_tokens=skip)
    batch = await made.build_batch(0)
    result = await loss_of(scene, batch)
    loss, entropies = 0.0, []
    for row in rows_of(scene, made, batch):
        log_q, ids = row.teacher[skip:].topk(TOPK)
        weights = log_q.softmax(-1)
        loss -= float((weights * row.student[skip:].gather(1, ids)).sum())
        entropies.append(-(weights * weights.log()).sum(1))
    entropy = float(torch.cat(entropies).mean())
    assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-4)
    metrics = made.step_metrics(0, batch, result)
    count = batch.metrics["sdft/total_completion_tokens"]
    assert count == sum(len(each) for each in entropies)
    assert batch.metrics["sdft/mean_teacher_entropy"] == pytest.approx(entropy, rel=1e-4)
    assert metrics["train_mean_nll"] == pytest.approx(loss / count, rel=1e-4)
    assert metrics["kl/forward"] == pytest.approx(loss / count - entropy, rel=1e-3)
    assert metrics["kl/forward"] > 0


async def test_reverse_kl(scene: Scene) -> None:
    made = await algorithm(scene, "sdft", topk=TOPK, skip_first_n_tokens=0, mode="reverse_kl")
    batch = await made.build_batch(0)
    result = await loss_of(scene, batch)
    loss = 0.0
    for row in rows_of(scene, made, batch):
        log_q, ids = row.teacher.topk(TOPK)
        log_p = row.student.gather(1, ids)
        rest_p, rest_q = (1 - each.exp().sum(1) for each in (log_p, log_q))
        loss += float((log_p.exp() * (log_p - log_q)).sum())
        loss += float((rest_p * (rest_p.log() - rest_q.log())).sum())
    assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-3)
    metrics = made.step_metrics(0, batch, result)
    count = batch.metrics["sdft/total_completion_tokens"]
    assert metrics["kl/reverse"] == pytest.approx(loss / count, rel=1e-3)


@pytest.mark.parametrize("kind", ["sdft", "distill"])
async def test_the_sampled_tokens_advantages(scene: Scene, kind: str) -> None:
    if kind == "sdft":
        params: dict[str, Any] = {"mode": "importance_sampling", "skip_first_n_tokens": 0}
    else:
        params = {"teacher": {"weights": str(scene.teacher)}}
    made = await algorithm(scene, kind, **params)
    batch = await made.build_batch(0)
    result = await loss_of(scene, batch)
    total, count, nll = 0.0, 0, 0.0
    for datum, row in zip(batch.data, rows_of(scene, made, batch), strict=True):
        said = torch.tensor(row.answer)[:, None]
        log_p, log_q = (each.gather(1, said)[:, 0] for each in (row.student, row.teacher))
        inputs = {name: t.to_numpy()[-len(said) :] for name, t in datum.loss_fn_inputs.items()}
        np.testing.assert_allclose(inputs["logprobs"], log_p, atol=1e-4)
        np.testing.assert_allclose(inputs["advantages"], log_q - log_p, atol=1e-4)
        total += float((log_p - log_q).sum())
        nll -= float(log_p.sum())
        count += len(said)
    # On fresh samples every ratio is 1, and the loss -sum A is the sum of log p - log q.
    assert result.metrics["loss:sum"] == pytest.approx(total, rel=1e-3)
    assert batch.metrics["kl/teacher"] == pytest.approx(total / count, rel=1e-3)
    assert made.step_metrics(0, batch, result)["train_mean_nll"] == pytest.approx(nll / count, 1e-4)


async def test_the_same_batch_comes_again_and_another_step_has_another(scene: Scene) -> None:
    made = await algorithm(scene, "sdft", topk=TOPK, skip_first_n_tokens=0)
    batches = [await made.build_batch(step) for step in (0, 0, 1)]
    tokens = [[d.model_input.to_ints() for d in batch.data] for batch in batches]
    weights = [[d.loss_fn_inputs["weights"].tolist() for d in b.data] for b in batches]
    assert tokens[0] == tokens[1] != tokens[2]
    assert weights[0] == weights[1]
