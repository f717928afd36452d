"""Scripts as people write them for the hosted service, with its two environment variables set.

Each is a whole program in a function: a service client without arguments, the tokenizer that the
training client names, nothing that is known of this engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.backends.engine.engine_process import KEY, EngineProcess
from tests.conformance.reference import MODEL

BASE = str(MODEL)
SUMS = MODEL.parents[1] / "data" / "arithmetic" / "train.jsonl"


@pytest.fixture(autouse=True)
def _hosted(running: EngineProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", running.url)
    monkeypatch.setenv("TINKER_API_KEY", KEY)


def questions(count: int, path: Path = SUMS) -> list[tuple[str, str]]:
    """Questions and their answers, bare numbers."""
    rows = [json.loads(line)["messages"] for line in path.read_text().splitlines()[:count]]
    return [(asked["content"], answered["content"]) for asked, answered in rows]


def render(tokenizer: Any, question: str) -> list[int]:
    """The prompt up to where the assistant begins."""
    tokens: list[int] = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )
    return tokens


# -- supervised fine-tuning --------------------------------------------------------------------


def supervised(tokenizer: Any, question: str, answer: str) -> types.Datum:
    """Next-token prediction on the answer, nothing on the prompt."""
    prompt = render(tokenizer, question)
    completion = tokenizer.encode(answer + "<|im_end|>")
    tokens = prompt + completion
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(completion)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


def nll(
    outputs: list[types.ForwardBackwardOutput], batches: list[list[types.Datum]]
) -> list[float]:
    """Mean loss a weighted token of each batch, from the logprobs that came back."""
    means = []
    for output, batch in zip(outputs, batches, strict=True):
        logprobs = np.concatenate([row["logprobs"].data for row in output.loss_fn_outputs])
        weights = np.concatenate([row.loss_fn_inputs["weights"].data for row in batch])
        means.append(float(-(logprobs @ weights) / weights.sum()))
    return means


def sl_loop(
    client: tinker.TrainingClient, batches: list[list[types.Datum]], first: int, last: int
) -> list[float]:
    """Steps first to last, each submitted whole before the one before is awaited."""
    pending: list[tuple[Any, Any]] = []
    outputs: list[types.ForwardBackwardOutput] = []

    def finish() -> None:
        passed, stepped = pending.pop(0)
        outputs.append(passed.result())
        stepped.result()

    for step in range(first, last):
        rate = 5e-3 * (1 - step / len(batches))
        adam = types.AdamParams(learning_rate=rate, beta1=0.9, beta2=0.95, eps=1e-8)
        pending.append(
            (client.forward_backward(batches[step], "cross_entropy"), client.optim_step(adam))
        )
        if len(pending) > 1:
            finish()
    while pending:
        finish()
    return nll(outputs, batches[first:last])


def test_supervised_learning_lowers_the_loss_and_resumes() -> None:
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(base_model=BASE, rank=16, seed=0).result()
    tokenizer = client.get_tokenizer()
    rows = [supervised(tokenizer, *pair) for pair in questions(16 * 12)]
    batches = [rows[start : start + 16] for start in range(0, len(rows), 16)]

    losses = sl_loop(client, batches, 0, 6)
    state = client.save_state("sl-0006", ttl_seconds=86400, user_metadata={"batch": "6"}).result()
    losses += sl_loop(client, batches, 6, 12)
    assert losses[0] == max(losses) > 0.4
    assert np.mean(losses[-4:]) < 0.1 * losses[0]

    again = tinker.ServiceClient()
    resumed = again.create_training_client_from_state_with_optimizer(state.path).result()
    assert sl_loop(resumed, batches, 6, 12) == losses[6:]

    sampler = resumed.save_weights_and_get_sampling_client(name="final").result()
    params = types.SamplingParams(max_tokens=8, temperature=0.0, stop=["<|im_end|>"])
    right = 0
    for question, answer in questions(16):
        prompt = types.ModelInput.from_ints(render(tokenizer, question))
        reply = sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result()
        right += tokenizer.decode(reply.sequences[0].tokens) == answer + "<|im_end|>"
    assert right >= 12
    again.close("success").result()
    service.close("success").result()


# -- reinforcement learning --------------------------------------------------------------------


def trajectory(prompt: list[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    """A sampled answer with its own logprobs; prompt positions have no advantage."""
    tokens, logprobs = sequence.tokens, sequence.logprobs
    assert logprobs is not None
    before = len(prompt) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(prompt + tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch(torch.tensor(prompt[1:] + tokens)),
            "logprobs": types.TensorData.from_torch(torch.tensor([0.0] * before + logprobs)),
            "advantages": types.TensorData.from_torch(
                torch.tensor([0.0] * before + [advantage] * len(tokens))
            ),
        },
    )


def rl_step(
    client: tinker.TrainingClient, tokenizer: Any, asked: list[tuple[str, str]], group: int
) -> float:
    """Sample groups, centre their rewards, take one step; the mean reward."""
    sampler = client.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=10, temperature=1.0, stop=["<|im_end|>"])
    prompts = [render(tokenizer, question) for question, _ in asked]
    futures = [
        sampler.sample(
            prompt=types.ModelInput.from_ints(prompt), num_samples=group, sampling_params=params
        )
        for prompt in prompts
    ]
    data, every, gain = [], [], 0.0
    for (_, answer), prompt, future in zip(asked, prompts, futures, strict=True):
        sequences = future.result().sequences
        texts = [tokenizer.decode(sequence.tokens) for sequence in sequences]
        rewards = np.array([float(text == answer + "<|im_end|>") for text in texts])
        every.append(rewards.mean())
        if rewards.std() == 0:
            continue
        for sequence, advantage in zip(sequences, rewards - rewards.mean(), strict=True):
            data.append(trajectory(prompt, sequence, float(advantage)))
            gain += float(advantage) * len(sequence.tokens)
    passed = client.forward_backward(data, "importance_sampling")
    stepped = client.optim_step(types.AdamParams(learning_rate=4e-3))
    # On policy every ratio is 1, so the loss is minus the advantages, token by token.
    assert passed.result().metrics["loss:sum"] == pytest.approx(-gain, rel=1e-3, abs=1e-2)
    stepped.result()
    return float(np.mean(every))


def test_reinforcement_learning_raises_the_reward() -> None:
    """The base says "It is 46." seven times in eight, and is paid for the bare number."""
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(base_model=BASE, rank=8, seed=1).result()
    tokenizer = client.get_tokenizer()
    asked = questions(8 * 6)
    rewards = [
        rl_step(client, tokenizer, asked[8 * step : 8 * step + 8], group=12) for step in range(6)
    ]
    assert rewards[0] < 0.3
    assert rewards[-1] > rewards[0] + 0.3
    path = client.save_weights_for_sampler("rl-final").result().path
    held = service.create_sampling_client(model_path=path).result()
    prompt = types.ModelInput.from_ints(render(tokenizer, asked[0][0]))
    params = types.SamplingParams(max_tokens=10, temperature=0.0, stop=["<|im_end|>"])
    reply = held.sample(prompt=prompt, num_samples=1, sampling_params=params).result()
    assert tokenizer.decode(reply.sequences[0].tokens) == asked[0][1] + "<|im_end|>"
    service.close("success").result()
