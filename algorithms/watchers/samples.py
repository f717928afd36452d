"""What the model says, in the terminal, at each evaluation."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, Field

from algorithms.callbacks import Callback, CallbackConfig

if TYPE_CHECKING:
    from algorithms.evaluators import EvaluationResult


class SamplesConfig(CallbackConfig):
    """How many, and of what."""

    count: int = Field(3, ge=1, description="The first so many of each evaluation's samples.")
    evaluation: str | None = Field(None, description="Of this evaluation only.")
    max_characters: int = Field(300, ge=1, description="Longer texts are cut.")


class Samples(Callback):
    """Prints samples to the terminal at each evaluation."""

    Config: ClassVar[type[BaseModel]] = SamplesConfig

    def __init__(self, cfg: SamplesConfig) -> None:
        self.cfg = cfg

    @classmethod
    def check(cls, cfg: SamplesConfig, evaluations: list[Any]) -> None:
        """The evaluation is one of the experiment's."""
        names = [spec.name for spec in evaluations]
        if cfg.evaluation is not None and cfg.evaluation not in names:
            raise ValueError(
                f"samples of {cfg.evaluation!r}, which is no evaluation of this experiment (they "
                f"are: {', '.join(names) or 'none'})"
            )

    def on_evaluation(self, result: EvaluationResult) -> None:
        """One table of the first samples, above the progress bar."""
        if self.cfg.evaluation not in (None, result.name):
            return
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        shown = [asdict(sample) for sample in result.samples[: self.cfg.count]]
        if not shown:
            return
        table = Table(title=f"{result.name} after step {result.step}", title_justify="left")
        for name in shown[0]:
            table.add_column(name.replace("_", " "), overflow="fold")
        for fields in shown:
            table.add_row(*(Text(self._short(value)) for value in fields.values()))
        Console().print(table)  # to where stdout goes now: above a bar, if there is one

    def _short(self, value: Any) -> str:
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        most = self.cfg.max_characters
        return text if len(text) <= most else text[: most - 1] + "…"
