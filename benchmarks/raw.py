"""The other side of the comparison: transformers, PEFT and AdamW, as a careful person writes them.

Right-padded batches with a mask for training, left-padded ones for `generate`; no mask where no row
is padded, since that is faster; no logprobs of what is generated, which the engine always gives.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - prompt.size :] = torch.from_numpy(prompt)
            mask[row, longest - prompt.size :] = 1
        self._model.eval()
        config = GenerationConfig(
            do_sample=True,
            top_k=0,
            max_new_tokens=max(lengths),
            num_return_sequences=samples,
            pad_token_id=0,
            # `generate` pads rows that are done only where it knows of a token that ends them.
            eos_token_id=self.vocabulary,
        )
        stop = _Lengths(longest, np.repeat(lengths, samples), self._device)
        self._model.generate(
            input_ids=ids.to(self._device),
            attention_mask=mask.to(self._device),
            generation_config=config,
            stopping_criteria=[stop],
        )
        return sum(lengths) * samples

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
