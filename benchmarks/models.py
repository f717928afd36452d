"""Models with random weights, made on the fly: what is in them matters to no figure."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

TINY: Final[dict[str, Any]] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
"""The shapes of examples/models/tiny-qwen3, with a longer context."""

SIZES: Final[dict[str, dict[str, Any]]] = {
    "random-0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    "random-1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
    "random-4b": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
}
"""The shapes of Qwen3 models, by what `--model` may be given instead of a folder."""
_OF_THAT_SIZE: Final[dict[str, Any]] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


SHIPPED: Final = Path("examples/models/tiny-qwen3")
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
END_OF_TURN: Final = 1
"""Of the shipped tokenizer."""
NEVER: Final = -100.0
"""A logit."""


def make(folder: Path, **shapes: Any) -> str:
    """Write a Qwen3 of these shapes (else the tiny ones) to the folder, without a tokenizer."""
    _random(**shapes).save_pretrained(folder)
    return str(folder)


def make_talker(folder: Path, end: float) -> str:
    """Write a tiny one to the folder, with the shipped tokenizer, that talks at random.

    Its turn ends with each token with the probability `end`: one coordinate is the same whatever it
    reads, and there the end of a turn has a weight and no other token has.
    """
    model = _random()
    logit = math.log(end / (1 - end) * model.config.vocab_size) if end else NEVER
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 10.0
        head = model.get_output_embeddings().weight
        head[:, 0] = 0.0
        head[END_OF_TURN] = 0.0
        head[END_OF_TURN, 0] = logit / math.sqrt(head.shape[1])  # the final norm makes 1 of a mean
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copyfile(SHIPPED / name, folder / name)
    return str(folder)


def _random(**shapes: Any) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(**TINY | shapes, pad_token_id=0, eos_token_id=1)
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def make_sized(folder: Path, size: str) -> str:
    """One of `SIZES`."""
    return make(folder, **_OF_THAT_SIZE | SIZES[size])
