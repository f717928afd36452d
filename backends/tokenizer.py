"""Tokenizers by hub name or folder."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from backends.base import Tokenizer
from backends.errors import Problem, UserError, first_line


@lru_cache(maxsize=4)
def load_tokenizer(model_name: str) -> Tokenizer:
    """The tokenizer of a model. Raises UserError if there is none under that name."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_name)
    except (OSError, ValueError) as error:
        folder = Path(model_name).expanduser()
        remedy = (
            "the folder needs tokenizer.json and tokenizer_config.json"
            if folder.is_dir()
            else "give a folder that is there, or a hub name such as Qwen/Qwen3-0.6B"
        )
        raise UserError(
            Problem(
                "model.name",
                f"no tokenizer found under {model_name!r}: {first_line(error)}",
                remedy,
            )
        ) from error
