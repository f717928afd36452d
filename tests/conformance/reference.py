"""The tiny model in float32 with plain transformers and torch, LoRA added by hand in a few lines.

Nothing here comes from the engine. Its weights reach the reference through the files that it saves
(PEFT's layout), so both sides start from the same bits. Shapes: N positions of one example, K
target candidates a position, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

MODEL = Path(__file__).parents[2] / "examples" / "models" / "tiny-qwen3"
VOCAB = 512
CONTEXT = 1024
END = 1
"""The model's end-of-sequence token."""

ADAPTER = "adapter_model.safetensors"
OPTIMIZER = "optimizer.safetensors"

LOGPROB_RTOL, LOGPROB_ATOL = 1e-4, 2e-5
"""float32 logits of size 20 to 40 are rounded by about 4e-6, which is all of a logprob near 0."""
GRADIENT_TOLERANCE = 1e-4
"""Of a matrix's largest entry: another order of summation moves it by some 1e-6."""


@dataclass(frozen=True)
class Example:
    """Tokens [N], their targets [N] or [N, K], and the loss's other inputs, of the same shape."""

    tokens: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    inputs: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)

    def tensor(self, name: str, default: float = 1.0) -> Tensor:
        """One input as a tensor; `default` everywhere if the example has none of that name."""
        if name in self.inputs:
            return torch.as_tensor(self.inputs[name])
        return torch.full(self.targets.shape, default)

    def having(self, **inputs: npt.NDArray[Any]) -> Example:
        """The same tokens with other inputs."""
        arrays = {name: np.asarray(array, np.float32) for name, array in inputs.items()}
        return Example(self.tokens, self.targets, arrays)


def example(seed: int, length: int) -> Example:
    """Random tokens predicting their successors."""
    tokens = np.random.default_rng(seed).integers(3, VOCAB, length + 1)
    return Example(tokens[:-1], tokens[1:])


def ragged(seed: int, lengths: Sequence[int] = (9, 31, 4, 17, 1, 24)) -> list[Example]:
    """Examples of several lengths whose weights are zero, one, fractional and negative."""
    rng = np.random.default_rng(seed)
    choices = np.array([0.0, 0.0, 1.0, 1.0, 0.25, -0.5], np.float32)
    rows = []
    for index, length in enumerate(lengths):
        row = example(1000 * seed + index, length)
        rows.append(row.having(weights=rng.choice(choices, length)))
    return rows


class LoraLinear(nn.Module):
    """y = W x + (alpha / r) B A x, as in the LoRA paper (arXiv 2106.09685)."""

    def __init__(self, linear: nn.Linear, a: Tensor, b: Tensor, alpha: float) -> None:
        super().__init__()
        self.linear = linear
        self.a, self.b = nn.Parameter(a.clone()), nn.Parameter(b.clone())
        self.scale = alpha / a.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        update = functional.linear(functional.linear(x, self.a), self.b)
        result: Tensor = self.linear(x) + self.scale * update
        return result


class Reference:
    """The base model, with the adapter in a folder if one is named."""

    def __init__(self, adapter: Path | None = None) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            MODEL, dtype=torch.float32, attn_implementation="eager"
        )
        self.model.eval().requires_grad_(False)
        self.parameters: dict[str, nn.Parameter] = {}
        """The adapter's matrices by their names in the file."""
        if adapter is not None:
            self._add(load_file(adapter / ADAPTER), adapter)

    def _add(self, tensors: Mapping[str, Tensor], folder: Path) -> None:
        alpha = json.loads((folder / "adapter_config.json").read_text())["lora_alpha"]
        for name in (name for name in tensors if ".lora_A." in name):
            other = name.replace(".lora_A.", ".lora_B.")
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            parent, _, leaf = path.rpartition(".")
            place = self.model.get_submodule(parent)
            lora = LoraLinear(getattr(place, leaf), tensors[name], tensors[other], alpha)
            setattr(place, leaf, lora)
            self.parameters |= {name: lora.a, other: lora.b}

    def distribution(self, tokens: Sequence[int] | npt.NDArray[np.int64]) -> Tensor:
        """Logprobs [N, V] of what comes after each token."""
        ids = torch.as_tensor(np.asarray(tokens))[None]
        logprobs: Tensor = self.model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        return logprobs

    def logprobs(self, row: Example) -> Tensor:
        """Logprobs of the example's targets, in their shape."""
        targets = torch.as_tensor(row.targets)
        picked = self.distribution(row.tokens).gather(-1, targets.reshape(len(targets), -1))
        return picked.reshape(targets.shape)

    def teacher_forced(self, prompt: Sequence[int], sampled: Sequence[int]) -> npt.NDArray[Any]:
        """Logprobs of sampled tokens, given the prompt and the tokens before them."""
        whole = np.array([*prompt, *sampled])
        with torch.no_grad():
            logprobs: npt.NDArray[Any] = self.logprobs(Example(whole[:-1], whole[1:])).numpy()
        return logprobs[len(prompt) - 1 :]

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """What transformers' own greedy generation adds to the prompt, past any end token."""
        ids = self.model.generate(
            input_ids=torch.as_tensor(prompt)[None],
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
        )
        new: list[int] = ids[0, len(prompt) :].tolist()
        return new

    def loss(
        self, rows: Sequence[Example], loss_fn: str, config: Mapping[str, float] | None = None
    ) -> Tensor:
        """The token sum over all examples."""
        return torch.stack(
            [loss_sum(loss_fn, self.logprobs(row), row, config or {}) for row in rows]
        ).sum()

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        """The loss's gradient by matrix."""
        grads = torch.autograd.grad(loss, list(self.parameters.values()), allow_unused=True)
        return {
            name: torch.zeros_like(parameter) if grad is None else grad
            for (name, parameter), grad in zip(self.parameters.items(), grads, strict=True)
        }


def loss_sum(loss_fn: str, p: Tensor, row: Example, config: Mapping[str, float]) -> Tensor:
    """The losses as the Tinker documentation writes them, summed over the example's tokens."""
    if loss_fn == "cross_entropy":
        return -(row.tensor("weights") * p).sum()
    q, advantages = row.tensor("logprobs"), row.tensor("advantages")
    ratio = torch.exp(p - q)
    if loss_fn == "importance_sampling":
        return -(ratio * advantages).sum()
    if loss_fn == "dro":
        return -(p * advantages - 0.5 * config.get("beta", 0.05) * (p - q) ** 2).sum()
    low, high = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0)}[loss_fn]
    low = config.get("clip_low_threshold", low)
    high = config.get("clip_high_threshold", high)
    clipped = torch.clamp(ratio, low, high)
    if loss_fn == "cispo":
        return -(clipped.detach() * p * advantages).sum()
    return -torch.min(ratio * advantages, clipped * advantages).sum()


def assert_logprobs(ours: Any, theirs: Any) -> None:
    """The same logprobs to a relative 1e-4, and to the rounding of the logits near 0."""
    np.testing.assert_allclose(
        np.asarray(ours, np.float32),
        np.asarray(theirs, np.float32),
        rtol=LOGPROB_RTOL,
        atol=LOGPROB_ATOL,
    )


def assert_gradients(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], tolerance: float = GRADIENT_TOLERANCE
) -> None:
    """The same matrices, each within the tolerance of its own largest entry."""
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        largest = float(expected.abs().max())
        difference = float((ours[name] - expected).abs().max())
        assert difference <= tolerance * largest + 1e-6, f"{name}: {difference} of {largest}"


def assert_same_bits(left: Path, right: Path) -> None:
    """Two saved folders hold the same tensors, optimizer included where one has it."""
    assert (left / OPTIMIZER).exists() == (right / OPTIMIZER).exists()
    for file in (ADAPTER, OPTIMIZER):
        if (left / file).exists():
            ours, theirs = load_file(left / file), load_file(right / file)
            assert ours.keys() == theirs.keys()
            assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
