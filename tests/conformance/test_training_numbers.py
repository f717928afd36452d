"""Passes and adapters: the numbers of a training client against plain transformers and torch."""

from __future__ import annotations

import pytest
import tinker
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tinker import types
from transformers import AutoModelForCausalLM

from tests.backends.engine.engine_process import KEY
from tests.conformance.bench import BASE, Bench, data, logprobs, model_input
from tests.conformance.reference import (
    ADAPTER,
    CONTEXT,
    MODEL,
    Example,
    Reference,
    assert_gradients,
    assert_logprobs,
    example,
    ragged,
)


def passed(client: tinker.TrainingClient, rows: list[Example]) -> types.ForwardBackwardOutput:
    """A pass without gradients."""
    return client.forward(data(rows), "cross_entropy").result()


def test_a_fresh_adapter_gives_the_logprobs_of_the_base(bench: Bench, base: Reference) -> None:
    rows = [*ragged(1), example(2, 200)]
    for ours, row in zip(logprobs(passed(bench.client(), rows)), rows, strict=True):
        assert_logprobs(ours, base.logprobs(row))


def test_a_trained_adapter_gives_the_logprobs_of_the_reference(
    learner: tinker.TrainingClient, reference: Reference, base: Reference
) -> None:
    rows = ragged(3)
    for ours, row in zip(logprobs(passed(learner, rows)), rows, strict=True):
        expected = reference.logprobs(row).detach()
        assert_logprobs(ours, expected)
        assert (expected - base.logprobs(row)).abs().max() > 0.1, "the adapter should matter"


def test_the_whole_context_can_be_trained_on(
    learner: tinker.TrainingClient, reference: Reference
) -> None:
    row = example(4, CONTEXT)
    (ours,) = logprobs(passed(learner, [row]))
    assert_logprobs(ours, reference.logprobs(row).detach())


def test_a_ragged_batch_equals_its_examples_one_by_one(learner: tinker.TrainingClient) -> None:
    """Other shapes sum in another order; the tolerance is that of float32 (see `reference`)."""
    rows = [*ragged(5), *ragged(6, (2, 2, 63, 64, 65))]
    alone = [passed(learner, [row]) for row in rows]
    together = passed(learner, rows)
    for ours, theirs in zip(logprobs(together), alone, strict=True):
        assert_logprobs(ours, logprobs(theirs)[0])
    total = sum(one.metrics["loss:sum"] for one in alone)
    assert together.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)


def test_the_loss_is_the_token_sum(learner: tinker.TrainingClient, reference: Reference) -> None:
    """Not a mean of any kind: twice the batch is twice the loss."""
    rows = ragged(7)
    expected = reference.loss(rows, "cross_entropy").item()
    for times in (1, 2):
        output = passed(learner, rows * times)
        assert output.metrics["loss:sum"] == pytest.approx(times * expected, rel=1e-5)
        assert all(name.count(":") == 1 for name in output.metrics)


def test_gradients_are_those_of_the_reference(
    bench: Bench, learner: tinker.TrainingClient, reference: Reference
) -> None:
    rows = [*ragged(8), example(9, 150)]
    learner.forward_backward(data(rows), "cross_entropy").result()
    expected = reference.gradients(reference.loss(rows, "cross_entropy"))
    assert_gradients(bench.gradients(learner), expected)
    assert all(float(matrix.abs().max()) > 0.1 for matrix in expected.values())


def test_gradients_at_a_fresh_adapter_reach_b_alone(bench: Bench) -> None:
    client = bench.client(seed=2)
    reference = Reference(bench.saved(client))
    rows = ragged(10)
    client.forward_backward(data(rows), "cross_entropy").result()
    ours = bench.gradients(client)
    assert_gradients(ours, reference.gradients(reference.loss(rows, "cross_entropy")))
    for name, gradient in ours.items():
        assert gradient.any() == (".lora_B." in name)


def test_a_batch_equals_its_parts_accumulated(bench: Bench, learner: tinker.TrainingClient) -> None:
    """Summed in another order, so to a millionth of each matrix's largest entry, and a bit."""
    rows = ragged(11)
    learner.forward_backward(data(rows), "cross_entropy").result()
    whole = bench.gradients(learner)
    for row in rows:
        learner.forward_backward(data([row]), "cross_entropy")
    assert_gradients(bench.gradients(learner), whole, 1e-5)


def test_forward_leaves_no_gradient(bench: Bench, learner: tinker.TrainingClient) -> None:
    passed(learner, ragged(12))
    assert not any(gradient.any() for gradient in bench.gradients(learner).values())


# -- adapters ----------------------------------------------------------------------------------

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
UNEMBED = {"lm_head"}


@pytest.mark.parametrize(
    ("layers", "leaves"),
    [
        ((True, False, False), ATTENTION),
        ((False, True, False), MLP),
        ((False, False, True), UNEMBED),
        ((True, True, False), ATTENTION | MLP),
        ((True, True, True), ATTENTION | MLP | UNEMBED),
    ],
    ids=["attention", "mlp", "unembed", "all-linear", "everything"],
)
def test_the_flags_choose_the_layers_and_peft_reads_them(
    bench: Bench, layers: tuple[bool, bool, bool], leaves: set[str]
) -> None:
    names = ("train_attn", "train_mlp", "train_unembed")
    client = bench.client(rank=3, seed=4, **dict(zip(names, layers, strict=True)))
    client.forward_backward(data(ragged(13)), "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    folder = bench.folder(client.save_weights_for_sampler("adapter").result().path)
    tensors = load_file(folder / ADAPTER)
    assert {name.split(".")[-3] for name in tensors} == leaves
    assert len(tensors) == 2 * (3 * len(leaves - UNEMBED) + len(leaves & UNEMBED))
    for name, matrix in tensors.items():
        assert matrix.shape[0 if ".lora_A." in name else 1] == 3
        assert matrix.any(), f"{name} should have moved, or been drawn"
    plain = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(plain, str(folder)).eval()
    rows = ragged(14)
    for ours, row in zip(logprobs(passed(client, rows)), rows, strict=True):
        logits = loaded(input_ids=torch.as_tensor(row.tokens)[None]).logits[0]
        targets = torch.as_tensor(row.targets)[:, None]
        assert_logprobs(ours, logits.log_softmax(-1).gather(-1, targets)[:, 0].detach())


def test_rank_and_seed_are_honoured(bench: Bench) -> None:
    first, same, other, wide = (
        bench.weights(bench.client(rank=rank, seed=seed))
        for rank, seed in ((4, 7), (4, 7), (4, 8), (32, 7))
    )
    for name, matrix in first.items():
        assert torch.equal(matrix, same[name])
        assert matrix.shape[0 if ".lora_A." in name else 1] == 4
        assert wide[name].shape[0 if ".lora_A." in name else 1] == 32
        if ".lora_A." in name:
            assert not torch.equal(matrix, other[name])
        else:
            assert not matrix.any()
    unseeded = [
        bench.weights(bench.service.create_lora_training_client(BASE, rank=4).result())
        for _ in range(2)
    ]
    assert not all(torch.equal(unseeded[0][name], unseeded[1][name]) for name in first)


# -- what a client is told ---------------------------------------------------------------------


def test_info_tokenizer_and_capabilities(bench: Bench) -> None:
    client = bench.client(rank=6)
    info = client.get_info()
    assert (info.model_id, info.model_data.model_name) == (client.model_id, BASE)
    assert (info.is_lora, info.lora_rank) == (True, 6)
    tokenizer = client.get_tokenizer()
    text = "What is 17 + 29?"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    rest = tinker.RestClient(base_url=bench.url, api_key=KEY)
    (model,) = rest.get_server_capabilities().result().supported_models
    assert (model.model_name, model.max_context_length) == (BASE, CONTEXT)
    sampler = bench.service.create_sampling_client(base_model=BASE).result()
    assert sampler.get_base_model() == BASE
    assert sampler.get_tokenizer().encode(text) == tokenizer.encode(text)
    too_long = types.Datum(
        model_input=model_input([5] * (CONTEXT + 1)),
        loss_fn_inputs={"target_tokens": [5] * (CONTEXT + 1)},
    )
    with pytest.raises(tinker.RequestFailedError, match=str(CONTEXT)):
        client.forward([too_long], "cross_entropy").result()
