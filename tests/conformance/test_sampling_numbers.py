"""Sampling: tokens, their frequencies and their logprobs against transformers and exact sums."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tinker
import torch
from tinker import types

from tests.conformance.bench import BASE, Bench, data, logprobs, model_input
from tests.conformance.reference import (
    CONTEXT,
    END,
    VOCAB,
    Example,
    Reference,
    assert_logprobs,
    assert_same_bits,
    ragged,
)

PROMPTS = [[17, 40, 99], list(range(20, 61)), [7], [300, 301, 302, 303, 304, 305, 306, 307]]


def draw(
    sampler: tinker.SamplingClient, prompt: list[int], num_samples: int = 1, **params: Any
) -> list[types.SampledSequence]:
    """Samples past any end token, unless `stop` says otherwise."""
    settings = types.SamplingParams(**({"max_tokens": 16, "stop": [], "seed": 1} | params))
    return list(sampler.sample(model_input(prompt), num_samples, settings).result().sequences)


def bits(sequences: list[types.SampledSequence]) -> list[tuple[bytes, bytes]]:
    """Tokens and logprobs, bit for bit."""
    found = []
    for sequence in sequences:
        assert sequence.tokens_np is not None
        assert sequence.logprobs_np is not None
        found.append((sequence.tokens_np.tobytes(), sequence.logprobs_np.tobytes()))
    return found


@pytest.fixture(scope="module")
def sampler(bench: Bench, far: str) -> tinker.SamplingClient:
    """Draws from the same weights as `far`."""
    return bench.resumed(far).save_weights_and_get_sampling_client().result()


@pytest.fixture(scope="module")
def of_base(bench: Bench) -> tinker.SamplingClient:
    """Draws from the base model."""
    return bench.service.create_sampling_client(base_model=BASE).result()


# -- which tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize("adapted", [True, False], ids=["adapter", "base"])
def test_greedy_is_that_of_transformers(
    sampler: tinker.SamplingClient,
    of_base: tinker.SamplingClient,
    reference: Reference,
    base: Reference,
    adapted: bool,
) -> None:
    client, model = (sampler, reference) if adapted else (of_base, base)
    asked = [
        client.sample(
            model_input(prompt), 1, types.SamplingParams(max_tokens=24, temperature=0, stop=[])
        )
        for prompt in PROMPTS
    ]
    for prompt, future in zip(PROMPTS, asked, strict=True):
        assert future.result().sequences[0].tokens == model.greedy(prompt, 24)


@pytest.mark.parametrize(
    "params",
    [{"temperature": 1e-6}, {"top_k": 1}, {"top_p": 1e-9}, {"top_k": 1, "temperature": 5.0}],
    ids=["cold", "top_k", "top_p", "hot top_k"],
)
def test_settings_that_leave_one_token_are_greedy(
    sampler: tinker.SamplingClient, reference: Reference, params: dict[str, float]
) -> None:
    for sequence in draw(sampler, PROMPTS[0], 2, **params):
        assert sequence.tokens == reference.greedy(PROMPTS[0], 16)


@pytest.mark.parametrize("seed", [0, -1, 2**31, 2**63 + 5])
def test_any_integer_is_a_seed(sampler: tinker.SamplingClient, seed: int) -> None:
    first, again, other = (draw(sampler, PROMPTS[0], seed=s) for s in (seed, seed, seed + 1))
    assert bits(first) == bits(again)
    assert bits(first) != bits(other)


def kept(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> npt.NDArray[Any]:
    """The exact probabilities [V] of one draw; what top-k and then top-p leave out is 0."""
    probs = (logits.double() / temperature).softmax(-1).numpy()
    order = np.argsort(-probs, kind="stable")[: top_k if top_k > 0 else None]
    ranked = probs[order] / probs[order].sum()
    order = order[np.cumsum(ranked) - ranked < top_p]
    exact = np.zeros_like(probs)
    exact[order] = probs[order] / probs[order].sum()
    return exact


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, -1, 1.0), (0.5, -1, 1.0), (2.0, 5, 1.0), (2.0, -1, 0.8), (3.0, 40, 0.8), (1.0, 1, 1.0)],
    ids=["plain", "temperature", "top_k", "top_p", "all", "top_k 1"],
)
def test_pairs_of_tokens_have_their_exact_frequencies(
    of_base: tinker.SamplingClient,
    base: Reference,
    temperature: float,
    top_k: int,
    top_p: float,
) -> None:
    """3,000 samples of two tokens, at a place where digits come, against the probabilities of the
    pairs: chi-squared below its mean + 5 standard deviations (the seed is fixed, so it either
    always is or never is). Pairs expected less than 5 times are counted together."""
    count = 3000
    prompt = of_base.get_tokenizer().encode("<|im_start|>user\nWhat is ")
    drawn = draw(
        of_base,
        prompt,
        count,
        max_tokens=2,
        seed=7,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
    )
    with torch.no_grad():
        first = kept(base.distribution(prompt)[-1], temperature, top_k, top_p)
        starts = np.flatnonzero(first > 1 / count)
        ids = torch.tensor([[*prompt, int(token)] for token in starts])
        after = base.model(input_ids=ids, use_cache=False).logits[:, -1]
    expected, seen = np.zeros((VOCAB, VOCAB)), np.zeros((VOCAB, VOCAB))
    for token, logits in zip(starts, after, strict=True):
        expected[token] = count * first[token] * kept(logits, temperature, top_k, top_p)
    np.add.at(seen, tuple(np.array([sequence.tokens for sequence in drawn]).T), 1)
    common = expected >= 5
    cells = [*zip(seen[common], expected[common], strict=True)]
    rest = count - sum(e for _, e in cells)
    if rest > 1:
        cells.append((count - sum(o for o, _ in cells), rest))
    chi = sum((o - e) ** 2 / e for o, e in cells)
    freedom = len(cells) - 1
    assert freedom > 10 or top_k == 1
    assert chi <= freedom + 5 * math.sqrt(2 * freedom)
    if top_k > 0 or top_p < 1:
        assert not seen[expected == 0].any(), "a token was drawn that top-k or top-p leaves out"


# -- logprobs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.3}, {"temperature": 1.7, "top_k": 20, "top_p": 0.9}, {"temperature": 0}],
    ids=["plain", "cold", "cut", "greedy"],
)
def test_sampled_logprobs_are_teacher_forced_ones(
    sampler: tinker.SamplingClient,
    learner: tinker.TrainingClient,
    reference: Reference,
    params: dict[str, float],
) -> None:
    """Those of the weights at temperature 1, however the token was drawn; as the reference, the
    training client and `compute_logprobs` give them for the same sequence."""
    for prompt in PROMPTS[:2]:
        sequences = draw(sampler, prompt, 3, max_tokens=30, **params)
        rows = []
        for sequence in sequences:
            assert_logprobs(sequence.logprobs, reference.teacher_forced(prompt, sequence.tokens))
            whole = np.array([*prompt, *sequence.tokens])
            rows.append(Example(whole[:-1], whole[1:]))
        passed = logprobs(learner.forward(data(rows), "cross_entropy").result())
        for sequence, ours in zip(sequences, passed, strict=True):
            assert_logprobs(sequence.logprobs, ours[len(prompt) - 1 :])
        scored = sampler.compute_logprobs(model_input([*prompt, *sequences[0].tokens])).result()
        assert scored[0] is None
        assert_logprobs(sequences[0].logprobs, scored[len(prompt) :])


def test_an_on_policy_ratio_is_one(
    sampler: tinker.SamplingClient, learner: tinker.TrainingClient
) -> None:
    """So importance sampling's loss is minus the number of tokens of advantage 1."""
    rows, count = [], 0
    for prompt in PROMPTS:
        for sequence in draw(sampler, prompt, 2, max_tokens=20):
            whole = np.array([*prompt, *sequence.tokens])
            silent = np.zeros(len(prompt) - 1)
            count += len(sequence.tokens)
            rows.append(
                Example(whole[:-1], whole[1:]).having(
                    logprobs=np.concatenate([silent, sequence.logprobs]),
                    advantages=np.concatenate([silent, np.ones(len(sequence.tokens))]),
                )
            )
    output = learner.forward(data(rows), "importance_sampling").result()
    assert output.metrics["loss:sum"] == pytest.approx(-count, rel=1e-4)


def test_prompt_logprobs(sampler: tinker.SamplingClient, reference: Reference) -> None:
    prompt = PROMPTS[1]
    answer = sampler.sample(
        model_input(prompt),
        2,
        types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=4,
    ).result()
    exact = reference.distribution(prompt)[:-1].detach()
    ours, top = answer.prompt_logprobs, answer.topk_prompt_logprobs
    assert ours is not None
    assert ours[0] is None
    assert_logprobs(ours[1:], exact.gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0])
    assert top is not None
    assert top[0] is None
    expected = exact.topk(4)
    for row, ids, values in zip(top[1:], expected.indices, expected.values, strict=True):
        assert row is not None
        assert [token for token, _ in row] == ids.tolist()
        assert_logprobs([value for _, value in row], values)
    last = sampler.compute_logprobs(model_input(prompt), prompt_logprobs_last_n=3).result()
    assert [value is None for value in last] == [True] * (len(prompt) - 3) + [False] * 3
    assert_logprobs(last[-3:], ours[-3:])
    assert sampler.compute_logprobs(model_input(prompt[:1])).result() == [None]
    plain = sampler.sample(model_input(prompt), 1, types.SamplingParams(max_tokens=1)).result()
    assert plain.prompt_logprobs is None
    assert plain.topk_prompt_logprobs is None


# -- how a sample ends -------------------------------------------------------------------------


def test_stop_tokens_and_stop_strings(
    bench: Bench, of_base: tinker.SamplingClient, base: Reference
) -> None:
    """The token that stops a sample is part of it, and has a logprob."""
    tokenizer = of_base.get_tokenizer()
    prompt = tokenizer.encode(
        "<|im_start|>user\nWhat is 17 + 29?<|im_end|>\n<|im_start|>assistant\n"
    )
    free = draw(of_base, prompt, temperature=0, max_tokens=30)[0]
    assert (len(free.tokens), free.stop_reason) == (30, "length")
    text = tokenizer.decode(free.tokens)
    assert text.startswith("It is 46.")
    for stop, ending in (
        (["46"], "It is 46"),
        ("t is", "It is"),
        (["never in there", "6."], "It is 46."),
        ([tokenizer.encode("4")[0]], "It is 4"),
        (["never in there", ".", "zzz"], "It is 46."),
    ):
        (cut,) = draw(of_base, prompt, temperature=0, max_tokens=30, stop=stop)
        assert tokenizer.decode(cut.tokens) == ending, stop
        assert cut.stop_reason == "stop"
        assert cut.tokens == free.tokens[: len(cut.tokens)]
        assert_logprobs(cut.logprobs, base.teacher_forced(prompt, cut.tokens))


def test_the_end_token_ends_unless_stop_is_given(of_base: tinker.SamplingClient) -> None:
    """`stop=[]` draws the same tokens, and goes on past the end."""
    params = {"temperature": 1.0, "max_tokens": 40, "seed": 3}
    free = draw(of_base, [17, END, 40], 24, stop=[], **params)
    ended = draw(of_base, [17, END, 40], 24, stop=None, **params)
    for whole, cut in zip(free, ended, strict=True):
        assert (len(whole.tokens), whole.stop_reason) == (40, "length")
        at = whole.tokens.index(END) + 1 if END in whole.tokens else 40
        assert cut.tokens == whole.tokens[:at]
        assert cut.stop_reason == ("stop" if END in whole.tokens else "length")
    assert {sequence.stop_reason for sequence in ended} == {"stop", "length"}


def test_a_sample_fills_the_context_and_no_more(of_base: tinker.SamplingClient) -> None:
    prompt = [5, 6] * (CONTEXT // 2 - 4)
    for most in (1000, None):
        (sequence,) = draw(of_base, prompt, max_tokens=most)
        assert (len(sequence.tokens), sequence.stop_reason) == (8, "length")


# -- seeds -------------------------------------------------------------------------------------


def test_seeds_decide_and_reach_across_sessions(
    bench: Bench, sampler: tinker.SamplingClient, far: str
) -> None:
    elsewhere = Bench(bench.url, bench.store)
    path = elsewhere.resumed(far).save_weights_for_sampler("elsewhere").result().path
    other = elsewhere.service.create_sampling_client(model_path=path).result()
    first = bits(draw(sampler, PROMPTS[0], 4, seed=11))
    assert first == bits(draw(sampler, PROMPTS[0], 4, seed=11))
    assert first == bits(draw(other, PROMPTS[0], 4, seed=11))
    assert first != bits(draw(sampler, PROMPTS[0], 4, seed=12))
    elsewhere.service.close("success").result()


def test_each_sample_is_independent(sampler: tinker.SamplingClient) -> None:
    """The first of many is the one alone; seeded or not, no two are alike."""
    few = draw(sampler, PROMPTS[0], 3, seed=13, max_tokens=24)
    many = draw(sampler, PROMPTS[0], 9, seed=13, max_tokens=24)
    assert [s.tokens for s in few] == [s.tokens for s in many[:3]]
    assert len({tuple(s.tokens) for s in many}) == 9
    unseeded = [
        *draw(sampler, PROMPTS[0], 4, seed=None, max_tokens=24),
        *draw(sampler, PROMPTS[0], 4, seed=None, max_tokens=24),
    ]
    assert len({tuple(s.tokens) for s in unseeded}) == 8


def test_a_seeded_sample_has_the_same_bits_in_a_crowd(
    bench: Bench, sampler: tinker.SamplingClient, of_base: tinker.SamplingClient
) -> None:
    """Tokens and logprobs, alone and while 16 other requests are drawn with it: other prompts,
    the same prompt, other lengths, other adapters."""
    asked = [
        (prompt, types.SamplingParams(max_tokens=20, seed=number, temperature=1.0, stop=[]))
        for number, prompt in enumerate(PROMPTS)
    ]

    def send() -> list[Any]:
        return [sampler.sample(model_input(prompt), 3, params) for prompt, params in asked]

    alone = [bits(list(sampler.sample(model_input(p), 3, s).result().sequences)) for p, s in asked]
    rng = np.random.default_rng(14)
    for _ in range(2):
        crowd = [
            (of_base if number % 4 == 0 else sampler).sample(
                model_input(
                    PROMPTS[0] if number % 5 == 0 else rng.integers(3, 500, 3 + 5 * number)
                ),
                1 + number % 3,
                types.SamplingParams(max_tokens=5 + 3 * number, temperature=1.3, stop=[]),
                include_prompt_logprobs=number % 2 == 0,
            )
            for number in range(16)
        ]
        together = [bits(list(future.result().sequences)) for future in send()]
        for future in crowd:
            future.result()
        assert together == alone


# -- whose weights -----------------------------------------------------------------------------


def test_a_sampler_keeps_its_weights_and_training_does_not_feel_it(bench: Bench, far: str) -> None:
    """Unnamed and named samplers alike; the training run has the bits of one without sampling."""
    adam = types.AdamParams(learning_rate=1e-2, weight_decay=0.1)
    busy, quiet = (bench.resumed(far, optimizer=True) for _ in range(2))
    samplers = [
        busy.save_weights_and_get_sampling_client().result(),
        busy.create_sampling_client(busy.save_weights_for_sampler("kept").result().path).result(),
    ]
    before = [bits(draw(sampler, PROMPTS[0], 2)) for sampler in samplers]
    assert before[0] == before[1]
    for step in range(3):
        passes = [c.forward_backward(data(ragged(step)), "cross_entropy") for c in (busy, quiet)]
        for sampler in samplers:
            sampler.sample(model_input(PROMPTS[1]), 2, types.SamplingParams(max_tokens=8)).result()
        for future in (busy.optim_step(adam), quiet.optim_step(adam), *passes):
            future.result()
        assert [bits(draw(sampler, PROMPTS[0], 2)) for sampler in samplers] == before
    assert_same_bits(bench.saved(busy), bench.saved(quiet))
    newer = busy.save_weights_and_get_sampling_client().result()
    assert bits(draw(newer, PROMPTS[0], 2)) != before[0]


def test_a_fresh_adapter_samples_as_the_base_does(
    bench: Bench, of_base: tinker.SamplingClient
) -> None:
    fresh = bench.client().save_weights_and_get_sampling_client().result()
    for ours, theirs in zip(draw(fresh, PROMPTS[1], 4), draw(of_base, PROMPTS[1], 4), strict=True):
        assert ours.tokens == theirs.tokens
        assert_logprobs(ours.logprobs, theirs.logprobs)
