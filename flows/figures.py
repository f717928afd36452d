"""How estimates and suggestions look in a terminal, and where prices come from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from backends.errors import Problem, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from algorithms.estimate import Estimate
    from algorithms.suggestion import Suggestion

PRICES = "FLOWTUNE_PRICES"
"""Names a YAML file of prices per million trained tokens, by model; flowtune knows none."""


def price_per_million(model: str, given: float | None) -> float | None:
    """The price that was given, or that of the model in the user's own list.

    Raises UserError for a list that cannot be read.
    """
    listed = os.environ.get(PRICES)
    if given is not None or not listed:
        return given
    try:
        prices = yaml.safe_load(Path(listed).read_text(encoding="utf-8"))
        price = prices.get(model)
        return None if price is None else float(price)
    except (OSError, yaml.YAMLError, AttributeError, TypeError, ValueError) as error:
        raise UserError(
            Problem(PRICES, f"{listed}: {error}", "one line a model: Qwen/Qwen3-8B: 0.4")
        ) from None


def print_estimate(console: Console, estimate: Estimate, price: float | None) -> None:
    """One line for each thing that a run takes."""
    lines = {"rows": f"{estimate.rows:,}", **_taken(estimate, price)}
    if estimate.tokens_per_row is not None:
        lines["rows"] += f", about {estimate.tokens_per_row:,.0f} tokens each"
    _print_lines(console, lines)


def print_stages(console: Console, stages: Mapping[str, Estimate], price: float | None) -> None:
    """What each stage takes, and all of them together."""
    from algorithms.estimate import in_sum

    for name, one in stages.items():
        console.print(f"stage {name}", markup=False)
        print_estimate(console, one, price)
    console.print("all stages")
    _print_lines(console, _taken(in_sum(list(stages.values())), price))


def _print_lines(console: Console, lines: Mapping[str, str]) -> None:
    for name, words in lines.items():
        console.print(f"  {name:<7} {words}", soft_wrap=True, markup=False)


def _taken(estimate: Estimate, price: float | None) -> dict[str, str]:
    """Steps, tokens, memory and price, each in words."""
    lines = {"steps": f"{estimate.steps:,}"}
    if estimate.tokens is None:
        lines["tokens"] = "not counted: the model's tokenizer is not on this machine yet"
    elif estimate.on_policy:
        lines["tokens"] = (
            f"at most about {_round(estimate.tokens)} trained on, {_round(estimate.sampled)} of "
            "them sampled"
        )
    else:
        lines["tokens"] = f"about {_round(estimate.tokens)} trained on"
    if (memory := estimate.memory) is not None:
        each = f" in each of {memory.processes} processes" if memory.processes > 1 else ""
        lines["memory"] = (
            f"about {_bytes(memory.total)} to train{each}: base {_bytes(memory.base)}, adapter and "
            f"optimizer {_bytes(memory.adapter)}, activations {_bytes(memory.activations)} "
            "(a rule of thumb)"
        )
    if price is not None and estimate.tokens is not None:
        lines["price"] = (
            f"about {estimate.tokens / 1e6 * price:,.2f} at {price:g} a million tokens trained on"
        )
    return lines


def print_suggestion(console: Console, model: str, suggestion: Suggestion) -> None:
    """The numbers, how to use them, and where they come from."""
    rate, size = f"{suggestion.learning_rate:.2g}", str(suggestion.batch_size)
    console.print(f"to start a LoRA run of {model}:", markup=False)
    console.print(f"  learning_rate  {rate}\n  batch_size     {size}")
    console.print("\nwhy:")
    for reason in suggestion.because:
        console.print(f"  {reason}", soft_wrap=True, markup=False)
    line = f"--set algorithm.params.learning_rate={rate} --set algorithm.params.batch_size={size}"
    console.print(f"\n{line}", soft_wrap=True, markup=False)


def _round(tokens: int) -> str:
    """Two figures that count, so that nobody takes it for exact."""
    return f"{float(f'{tokens:.2g}'):,.0f}"


def _bytes(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} GB" if count < 1000 else f"{count:,.0f} GB"
