"""Soft targets by hand: renormalised, placed where they predict, and their losses."""

from __future__ import annotations

import math
from collections.abc import Awaitable

import numpy as np
import pytest
import tinker
import torch
from tinker import types as tinker_types

from algorithms.distill import discounted
from algorithms.soft_targets import (
    Candidates,
    entropy,
    opinion,
    reverse_kl,
    soft_datum,
    soft_loss,
)
from backends.base import ModelOutput
from backends.errors import UserError

LN2, LN3, LN4 = math.log(2), math.log(3), math.log(4)

# Three places, two candidates each: probabilities 1/2 and 1/4; 1/4 and 1/4; 1/3 and none.
CANDIDATES = Candidates(
    np.asarray([[7, 8], [0, 9], [5, 0]]),
    np.asarray([[-LN2, -LN4], [-LN4, -LN4], [-LN3, -np.inf]]),
)


def test_soft_targets_are_the_teachers_probabilities_among_its_candidates() -> None:
    expected = [[2 / 3, 1 / 3], [1 / 2, 1 / 2], [1, 0]]
    np.testing.assert_allclose(CANDIDATES.weights(), expected, rtol=1e-15)
    far = Candidates(CANDIDATES.ids[:1], CANDIDATES.logprobs[:1] - 5000)
    np.testing.assert_allclose(far.weights(), expected[:1], rtol=1e-12)


def test_entropy_is_in_nats_and_a_sure_teacher_has_none() -> None:
    expected = [math.log(3) - 2 / 3 * math.log(2), math.log(2), 0.0]
    np.testing.assert_allclose(entropy(CANDIDATES.weights()), expected, rtol=1e-14)


def dense(datum: tinker.Datum, name: str) -> list[list[float]]:
    rows: list[list[float]] = datum.loss_fn_inputs[name].to_numpy().tolist()
    return rows


def test_targets_stand_where_the_student_predicts_them() -> None:
    # Prompt 1 2, answer 3 4 5 6; the teacher has read three of the four, and the first is skipped.
    counted = np.asarray([False, True, True, False])
    weights = CANDIDATES.weights()
    datum = soft_datum([1, 2], [3, 4, 5, 6], CANDIDATES.ids, weights, counted)
    assert datum.model_input.to_ints() == [1, 2, 3, 4, 5]
    # Row 0 predicts prompt token 2, row 1 answer token 3, row 2 answer token 4, ...
    assert dense(datum, "target_tokens") == [[0, 0], [0, 0], [0, 9], [5, 0], [0, 0]]
    assert dense(datum, "weights") == [[0, 0], [0, 0], [0.5, 0.5], [1, 0], [0, 0]]


def result(*logprobs: list[list[float]]) -> tinker_types.ForwardBackwardOutput:
    return tinker_types.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord",
        loss_fn_outputs=[
            {"logprobs": tinker.TensorData.from_numpy(np.asarray(rows, np.float32))}
            for rows in logprobs
        ],
    )


def test_loss_and_kl_are_means_over_the_places_that_count() -> None:
    counted = np.asarray([False, True, True])
    q = np.exp(CANDIDATES.logprobs)  # not renormalised, as under the reverse KL
    datum = soft_datum([1], [3, 4, 5], CANDIDATES.ids, q, counted)
    loss = soft_loss([datum], result([[-9, -9], [-1, -2], [-3, -9]]))
    # (1/2 * 1 + 1/2 * 2) and 1 * 3, over two places; entropies ln 2 and 0
    assert loss.positions == 2
    assert loss.nll == pytest.approx((1.5 + 3) / 2)
    assert loss.forward_kl == pytest.approx((1.5 + 3 - LN2) / 2)


def test_the_reverse_kl_by_hand() -> None:
    datum = soft_datum([1], [3], np.asarray([[7, 8]]), np.asarray([[0.5, 0.25]]), TRUE)
    log_p = torch.log(torch.tensor([[0.25, 0.25]]))
    # p = 1/4, 1/4, rest 1/2; q = 1/2, 1/4, rest 1/4
    expected = 0.25 * math.log(0.5) + 0.25 * 0 + 0.5 * math.log(2)
    assert float(reverse_kl(ModelOutput([log_p]), [datum])) == pytest.approx(expected, rel=1e-6)


TRUE = np.asarray([True])


def test_with_all_of_the_vocabulary_it_is_the_kl_and_has_its_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, generator=generator, requires_grad=True)
    log_q = torch.log_softmax(torch.randn(2, 4, generator=generator), -1)
    everything = np.tile(np.arange(4), (2, 1))
    q = log_q.double().exp().numpy()
    datum = soft_datum([1], [2, 3], everything, q, np.asarray([True, True]))
    ours = reverse_kl(ModelOutput([torch.log_softmax(logits, -1)]), [datum])
    log_p = torch.log_softmax(logits, -1)
    true = (log_p.exp() * (log_p - log_q)).sum()
    assert float(ours.detach()) == pytest.approx(float(true.detach()), abs=1e-5)
    (own,) = torch.autograd.grad(ours, logits)
    (right,) = torch.autograd.grad(true, logits)
    torch.testing.assert_close(own, right, atol=1e-5, rtol=1e-4)


def test_a_student_that_leaves_the_candidates_is_pulled_back() -> None:
    datum = soft_datum([1], [2], np.asarray([[0]]), np.asarray([[0.9]]), TRUE)
    log_p = torch.log(torch.tensor([[0.1]])).requires_grad_()
    loss = reverse_kl(ModelOutput([log_p]), [datum])
    assert float(loss.detach()) == pytest.approx(
        0.1 * math.log(1 / 9) + 0.9 * math.log(9), rel=1e-5
    )
    (slope,) = torch.autograd.grad(loss, log_p)
    assert float(slope) < 0  # more of the candidate, less loss


def test_discounted_advantages_by_hand() -> None:
    rewards = np.asarray([1.0, -2.0, 4.0])
    assert discounted(rewards, 0).tolist() == [1, -2, 4]
    assert discounted(rewards, 0.5).tolist() == [1, 0, 4]
    assert discounted(rewards, 1).tolist() == [3, 2, 4]
    assert rewards.tolist() == [1, -2, 4]


class Answering:
    """A sampling client with one answer."""

    def __init__(self, response: tinker_types.SampleResponse) -> None:
        self._response = response

    def sample(
        self,
        prompt: tinker_types.ModelInput,
        num_samples: int,
        sampling_params: tinker_types.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> Awaitable[tinker_types.SampleResponse]:
        async def answered() -> tinker_types.SampleResponse:
            return self._response

        return answered()


def response(
    logprobs: list[float | None] | None, tops: list[list[tuple[int, float]] | None] | None
) -> tinker_types.SampleResponse:
    return tinker_types.SampleResponse(
        sequences=[], _prompt_logprobs_list=logprobs, _topk_prompt_logprobs_list=tops
    )


async def test_an_opinion_is_of_the_answer_alone() -> None:
    tops: list[list[tuple[int, float]] | None] = [
        None,
        [(1, -1.0)],
        [(7, -0.5), (8, -1.5)],
        [(9, -2.0)],
    ]
    client = Answering(response([None, -1.0, -2.0, -3.0], tops))
    thinks = await opinion(client, [1, 2], [3, 4], k=2)
    assert thinks.logprobs.tolist() == [-2, -3]
    assert thinks.candidates is not None
    assert thinks.candidates.ids.tolist() == [[7, 8], [9, 0]]
    assert thinks.candidates.logprobs.tolist() == [[-0.5, -1.5], [-2.0, -np.inf]]
    assert (await opinion(client, [1, 2], [3, 4], k=0)).candidates is None


@pytest.mark.parametrize(
    ("logprobs", "tops", "says"),
    [
        (None, None, "no logprob of some of an answer's 2 tokens"),
        ([None, -1.0, -2.0, None], None, "no logprob of some"),
        ([None, -1.0, -2.0, -math.inf], None, "no logprob of some"),
        ([None, -1.0, -2.0, -3.0], None, "no likeliest tokens at some of an answer's 2 places"),
        ([None, -1.0, -2.0, -3.0], [None, [(1, -1.0)], [(1, -1.0)], None], "no likeliest tokens"),
    ],
)
async def test_what_the_teacher_leaves_out_is_an_error(
    logprobs: list[float | None] | None,
    tops: list[list[tuple[int, float]] | None] | None,
    says: str,
) -> None:
    with pytest.raises(UserError, match=says):
        await opinion(Answering(response(logprobs, tops)), [1, 2], [3, 4], k=1)
