"""The other side of the comparison: transformers, PEFT and AdamW, as a careful person writes them.

Right-padded batches with a mask for training, left-padded ones for `generate`; no mask where no row
is padded, since that is faster; no logprobs of what is generated, which the engine always gives.
On-policy these are not needed: the first step's ratios are 1, and the gradient is REINFORCE's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import peft
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria
from transformers.utils import logging

RANK: Final = 16
LEARNING_RATE: Final = 1e-4
PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NO_TARGET: Final = -100

Tokens = npt.NDArray[np.int64]


class RawModel:
    """One model with a LoRA adapter on every projection and the head, and its optimizer."""

    def __init__(self, name: str, device: str) -> None:
        logging.disable_progress_bar()
        self._device = device
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        base = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation="sdpa")
        self.vocabulary = int(base.config.vocab_size)
        self.matmul_parameters = sum(
            module.weight.numel()
            for module in base.modules()
            if isinstance(module, torch.nn.Linear)
        )
        config = peft.LoraConfig(
            r=RANK, lora_alpha=32, target_modules=[*PROJECTIONS, "lm_head"], lora_dropout=0.0
        )
        self._model = peft.get_peft_model(base.to(device), config)

    def fresh(self) -> None:
        """Start over: an adapter that changes nothing yet, and a new optimizer."""
        for name, parameter in self._model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.zeros_(parameter)
        trained = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)

    def train(self, rows: Sequence[Tokens], steps: int) -> float:
        """Steps on one batch, rows [N + 1] of tokens; the first step's loss sum."""
        ids, targets, mask = self._padded(rows)
        self._model.train()
        first: Tensor | None = None
        for _ in range(steps):
            logits = self._model(input_ids=ids, attention_mask=mask).logits
            loss = functional.cross_entropy(
                logits.flatten(0, 1).float(), targets, ignore_index=NO_TARGET, reduction="sum"
            )
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            first = loss.detach() if first is None else first
        assert first is not None
        return float(first)  # which also waits for the device

    def generate(self, prompts: Sequence[Tokens], lengths: Sequence[int], samples: int = 1) -> int:
        """Sample each prompt up to its own length; the number of tokens that were wanted.

        As `generate` has it: a row that is done is padded until all are.
        """
        longest = max(prompt.size for prompt in prompts)
        stop = _Lengths(longest, np.repeat(lengths, samples), self._device)
        # `generate` pads rows that are done only where it knows of a token that ends them.
        self._sampled(prompts, samples, max(lengths), self.vocabulary, [stop])
        return sum(lengths) * samples

    def reinforce(
        self,
        prompts: Sequence[Tokens],
        samples: int,
        most: int,
        end: int,
        reward: Callable[[Tokens], float],
    ) -> int:
        """One step of reinforcement learning from groups of samples; the tokens that were sampled.

        Samples end with the token `end`, or are `most` tokens long; prompts are all of one size. A
        sample's advantage is its reward less the mean of its group [G]; one that has none is left
        out. `reward` is given a sample's tokens.
        """
        ids = self._sampled(prompts, samples, most, end, [])
        answers = ids[:, prompts[0].size :]
        ends = answers == end
        mask = ends.cumsum(1) - ends.long() == 0  # up to the first end, and that
        sizes = mask.sum(1)
        rewards = torch.tensor(
            [reward(row[:size]) for row, size in zip(answers.cpu().numpy(), sizes, strict=True)]
        )
        rewards_G = rewards.view(len(prompts), samples)
        advantages = (rewards_G - rewards_G.mean(dim=1, keepdim=True)).flatten().to(self._device)
        trained = advantages != 0
        self._policy_gradient(ids[trained], mask[trained], advantages[trained])
        return int(sizes.sum())

    def _policy_gradient(self, ids: Tensor, mask: Tensor, advantages: Tensor) -> None:
        """A step on sequences [B, P + T], of which `mask` [B, T] says what was sampled.

        They are padded on the right and attention is causal: it needs no mask.
        """
        self._model.train()
        length = mask.shape[1]
        logits = self._model(input_ids=ids[:, :-1], logits_to_keep=length).logits
        losses = functional.cross_entropy(
            logits.flatten(0, 1).float(), ids[:, -length:].flatten(), reduction="none"
        )
        (losses.view(-1, length) * mask * advantages[:, None]).sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _sampled(
        self,
        prompts: Sequence[Tokens],
        samples: int,
        most: int,
        end: int,
        stopping: list[StoppingCriteria],
    ) -> Tensor:
        """Prompts, padded on the left, and what follows them, [prompts * samples, longest]."""
        longest = max(prompt.size for prompt in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - prompt.size :] = torch.from_numpy(prompt)
            mask[row, longest - prompt.size :] = 1
        self._model.eval()
        config = GenerationConfig(
            do_sample=True,
            top_k=0,
            max_new_tokens=most,
            num_return_sequences=samples,
            pad_token_id=0,
            eos_token_id=end,
        )
        sampled: Tensor = self._model.generate(
            input_ids=ids.to(self._device),
            attention_mask=mask.to(self._device),
            generation_config=config,
            stopping_criteria=stopping,
        )
        return sampled

    def _padded(self, rows: Sequence[Tokens]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ids [B, T], targets [B * T], and the mask [B, T] if there is padding."""
        sizes = [row.size - 1 for row in rows]
        ids = torch.zeros(len(rows), max(sizes), dtype=torch.int64)
        targets = torch.full_like(ids, NO_TARGET)
        for index, (row, size) in enumerate(zip(rows, sizes, strict=True)):
            ids[index, :size] = torch.from_numpy(row[:-1])
            targets[index, :size] = torch.from_numpy(row[1:])
        mask = (targets != NO_TARGET).long() if min(sizes) < max(sizes) else None
        device = self._device
        return (
            ids.to(device),
            targets.flatten().to(device),
            mask.to(device) if mask is not None else None,
        )


class _Lengths(StoppingCriteria):  # type: ignore[misc]
    """Row i is done after lengths[i] tokens; as cheap as a stop can be."""

    def __init__(self, prompt: int, lengths: npt.NDArray[np.int64], device: str) -> None:
        self._ends = torch.from_numpy(np.asarray(lengths) + prompt).to(device)

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Which rows [B] are done."""
        return self._ends <= input_ids.shape[1]
