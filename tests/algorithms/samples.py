"""What several tests here use: byte tokenizers with different templates, documents, a live mock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from algorithms.base import BaseAlgorithm, RunContext
from algorithms.data.dataset import load_dataset
from algorithms.experiment import Experiment, parse_experiment
from backends.base import SavedState
from backends.mock import MockBackend, MockKind, MockParams

MODEL = Path(__file__).parents[2] / "examples" / "models" / "tiny-qwen3"

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3's own: thinking is kept in the last turn only, and an empty one is put there.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Llama 3's: the turn ends with a special token that is not eos, and nothing follows it.
HEADERS = (
    "{{ bos_token }}{% for m in messages %}<|h|>{{ m.role }}<|/h|>\n\n{{ m.content }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|h|>assistant<|/h|>\n\n{% endif %}"
)
# No special tokens at all.
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
STRICT = "{{ raise_exception('roles must alternate') if messages|length > 2 }}" + CHATML


def byte_tokenizer(
    template: str | None = CHATML,
    eos: str = "<|im_end|>",
    bos: str | None = None,
    specials: tuple[str, ...] = ("<|im_start|>",),
    merges: tuple[tuple[str, str], ...] = (),
) -> Any:
    """A fast tokenizer in which every byte is a token, but for the merges that are asked for."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate(alphabet)}
    for first, second in merges:
        vocab[first + second] = len(vocab)
    inner = Tokenizer(models.BPE(vocab, list(merges)))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=eos,
        bos_token=bos,
        extra_special_tokens=list(specials),
    )
    tokenizer.chat_template = template
    return tokenizer


def chat(*contents: str) -> dict[str, Any]:
    """A row of user and assistant turns, one after the other."""
    roles = ("user", "assistant")
    return {
        "messages": [
            {"role": roles[index % 2], "content": content} for index, content in enumerate(contents)
        ]
    }


ROWS = [chat(f"say {n}", f"number {n}") for n in range(7)]
ECHOES = [chat(word, word) for word in ["one", "two", "three"]]


def document(**changes: Any) -> dict[str, Any]:
    """A small mock experiment, as a YAML file would hold it."""
    base: dict[str, Any] = {
        "name": "small",
        "model": {"name": "mock"},
        "data": {"kind": "rows", "rows": ROWS},
        "algorithm": {"kind": "mock_sft", "params": {"batch_size": 3}},
    }
    return base | changes


def experiment(**changes: Any) -> Experiment:
    return parse_experiment(document(**changes))


async def open_backend(spec: Experiment, state: SavedState | None = None) -> MockBackend:
    return await MockKind.open(MockParams(), spec.model_spec(), state)


async def set_up(spec: Experiment, backend: MockBackend) -> BaseAlgorithm:
    """The experiment's algorithm, ready to build batches."""
    algorithm = spec.algorithm.build()
    context = RunContext(
        "run", "runs/run", spec, load_dataset(spec.data), backend, backend.get_tokenizer()
    )
    await algorithm.setup(context, backend)
    return algorithm


async def train(
    spec: Experiment, backend: MockBackend, first: int = 0, last: int | None = None
) -> list[dict[str, float]]:
    """Steps `first` to `last` the way a run does them; their metrics."""
    algorithm = await set_up(spec, backend)
    rows = []
    for step in range(first, algorithm.total_steps if last is None else last):
        batch = await algorithm.build_batch(step)
        if callable(batch.loss_fn):
            passed = backend.forward_backward_custom_async(batch.data, batch.loss_fn)
        else:
            passed = backend.forward_backward_async(batch.data, loss_fn=batch.loss_fn)
        stepped = backend.optim_step_async(algorithm.adam_params(step))
        rows.append(algorithm.step_metrics(step, batch, await passed))
        await stepped
    return rows
