"""Where to start with a LoRA run of a model: learning rate and batch size, and who says so.

Learning rates are those of Adam, which does not care how a loss is scaled, so they hold for summed
and for averaged losses alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from algorithms.model_facts import read_config, text_config
from backends.errors import Problem, UserError

MEASURED: Mapping[str, float] = {
    "Qwen/Qwen3-235B-A22B-Instruct-2507": 3e-4,
    "Qwen/Qwen3-30B-A3B": 1e-3,
    "Qwen/Qwen3-30B-A3B-Base": 1e-3,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 1e-3,
    "Qwen/Qwen3-32B": 3e-4,
    "Qwen/Qwen3-4B-Instruct-2507": 1e-3,
    "Qwen/Qwen3-8B": 1e-3,
    "Qwen/Qwen3-8B-Base": 1e-3,
    "Qwen/Qwen3.5-27B": 3e-4,
    "Qwen/Qwen3.5-35B-A3B": 3e-4,
    "Qwen/Qwen3.5-397B-A17B": 3e-4,
    "Qwen/Qwen3.5-4B": 3e-4,
    "deepseek-ai/DeepSeek-V3.1": 4e-4,
    "deepseek-ai/DeepSeek-V3.1-Base": 4e-4,
    "meta-llama/Llama-3.1-70B": 3e-4,
    "meta-llama/Llama-3.1-8B": 3e-4,
    "meta-llama/Llama-3.1-8B-Instruct": 3e-4,
    "meta-llama/Llama-3.2-1B": 1e-3,
    "meta-llama/Llama-3.2-3B": 1e-3,
    "meta-llama/Llama-3.3-70B-Instruct": 3e-4,
    "moonshotai/Kimi-K2-Thinking": 3e-4,
    "openai/gpt-oss-120b": 3e-4,
    "openai/gpt-oss-20b": 1e-4,
}
"""The best of a sweep of LoRA learning rates: tulu3, batches of 128, 780 steps."""

FULL_FINE_TUNING_RATE = 5e-5
LORA_FACTOR = 10.0
REFERENCE_HIDDEN_SIZE = 2000
EXPONENTS: Mapping[str, float] = {"qwen": 0.0775, "llama": 0.781}
"""How the best rate falls with the hidden size, by the beginning of the model's type."""

BATCH_SIZE = 128
SMALLEST_BATCH = 8
LEAST_STEPS = 100

COOKBOOK = "tinker-cookbook, hyperparam_utils.get_lr"
WITHOUT_REGRET = "Schulman et al., LoRA Without Regret (2025), thinkingmachines.ai/blog/lora"


@dataclass(frozen=True)
class Suggestion:
    """Numbers to start from; `because` gives the rule and the source of each, a line apiece."""

    learning_rate: float
    batch_size: int
    because: tuple[str, ...]


def suggest(model: str, rows: int | None = None) -> Suggestion:
    """A start for a LoRA run of a model (a folder or hub name) on so many rows.

    Raises UserError for a model of which no config can be had.
    """
    rate, why = _learning_rate(model)
    batch_size = _batch_size(rows)
    because = [why]
    if rows is None:
        because.append(
            f"batch size: that of the sweep ({COOKBOOK}); LoRA bears large batches less well than "
            f"full fine-tuning does ({WITHOUT_REGRET}). Say --rows to fit it to your data"
        )
    else:
        steps = -(-rows // batch_size)
        because.append(
            f"batch size: {steps} steps a pass over {rows:,} rows; at least {LEAST_STEPS} steps "
            "are wanted, better 1,000 (Tinker's documentation, SL hyperparameters)"
        )
    if batch_size != BATCH_SIZE:
        rate *= math.sqrt(batch_size / BATCH_SIZE)
        because.append(
            f"learning rate times sqrt({batch_size} / {BATCH_SIZE}) for the smaller batch (same)"
        )
    because.append(
        f"lora_rank: any; the best learning rate hardly depends on it ({WITHOUT_REGRET})"
    )
    return Suggestion(rate, batch_size, tuple(because))


def _learning_rate(model: str) -> tuple[float, str]:
    if (measured := MEASURED.get(model)) is not None:
        return measured, (
            f"learning rate: the best for {model} in a sweep on tulu3, batches of 128, 780 steps "
            f"({COOKBOOK})"
        )
    config = read_config(model)
    kind = str(config.get("model_type", "unknown"))
    hidden_size = text_config(config).get("hidden_size")
    if not isinstance(hidden_size, int):
        what = f"the config.json of {model} has no hidden_size"
        raise UserError(Problem("model", what, "is it a language model's?"))
    rate = FULL_FINE_TUNING_RATE * LORA_FACTOR
    why = (
        f"learning rate: {FULL_FINE_TUNING_RATE:g} for full fine-tuning, times {LORA_FACTOR:g} for "
        f"LoRA ({WITHOUT_REGRET})"
    )
    exponent = next((e for family, e in EXPONENTS.items() if kind.startswith(family)), None)
    if exponent is None:
        known = " and ".join(EXPONENTS)
        return rate, f"{why}; how it goes with the size is known of {known} only, not of {kind}"
    return rate * (REFERENCE_HIDDEN_SIZE / hidden_size) ** exponent, (
        f"{why}, times ({REFERENCE_HIDDEN_SIZE} / hidden size {hidden_size}) ^ {exponent} for "
        f"{kind} (tinker-cookbook's first get_lr)"
    )


def _batch_size(rows: int | None) -> int:
    """The largest power of two up to 128 that leaves 100 steps a pass, and no less than 8."""
    if rows is None:
        return BATCH_SIZE
    fitting: int = 2 ** int(math.log2(max(rows / LEAST_STEPS, 1)))
    return min(max(fitting, SMALLEST_BATCH), BATCH_SIZE)
