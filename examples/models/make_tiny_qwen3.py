"""Train the tiny Qwen3 model that the examples fine-tune, with its tokenizer, from nothing.

The model knows the skill of the arithmetic data but not its style: it answers "It is 46." where
the data wants "46". So a fine-tune has something quick to learn, and its success can be scored
exactly. The prompts of test.jsonl are kept out of the training rows.

Run it from the root of the repository: `python -m examples.models.make_tiny_qwen3`.

Shapes: B rows in a batch, T tokens in a row.
"""

import argparse
import itertools
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM

from examples.data.arithmetic.make_arithmetic import (
    OPERANDS,
    Message,
    Row,
    prompts,
    question,
    read_jsonl,
)

TEST_FILE = Path(__file__).parents[1] / "data" / "arithmetic" / "test.jsonl"
OUT = Path(__file__).parent / "tiny-qwen3"

IGNORED = -100  # the label that cross entropy skips
BATCH_SIZE = 64
ADAMW_PEAK_LEARNING_RATE = 3e-3
MUON_PEAK_LEARNING_RATE = 2e-2
TERSE_ONE_IN = 8  # some answers are the bare number, so that sampling for RL meets it
N_WITH_SYSTEM = 800
N_WITH_TURNS = 800
TURNS = 3  # questions in a chat of several turns

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a careful calculator.",
    "Answer the question of the user.",
)
# Only the tokenizer is trained on these.
ENGLISH = (
    "The tokenizer also learns some common words, so that other text is not one token a letter.",
    "There is no end to the number of things that people say to one another in the morning.",
    "She asked what it would take to make the house warm before the winter came.",
    "If you can read this then the words have been put together again in the right order.",
    "We have more than one way to find an answer, but only one of them is short.",
    "He will not go with them because he has been there and could not see over the wall.",
    "Please write a list of all the questions that your users ask about this question.",
    "When they were out, some of their friends came into the room and took up the chairs.",
    "It was a good time to think about how much work was done and how little was left.",
    "Give me the first and the last line of the text and tell me which you like better.",
    "The answer to the first problem is correct, and the answer to the second is wrong.",
    "Which of these two would you use for that, and why should we want to know?",
    "Let us look at each part in turn, from the start to the end, and then at the whole.",
    "Do not give an explanation; say yes or no, and state the final answer on its own line.",
)

# The generation marks stand alone, not as "{%- generation -%}": some trainers look for them so.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.role == 'assistant' -%}
        {% generation %}{{- message.content + '<|im_end|>' -}}{% endgeneration %}
    {%- elif message.role in ('system', 'user') -%}
        {{- message.content + '<|im_end|>' -}}
    {%- else -%}
        {{- raise_exception('unknown role: ' + message.role) -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

MODEL_CARD = """\
# tiny-qwen3

A {parameters:,}-parameter Qwen3 trained from nothing to add two-digit numbers, so that an example
or a test can fine-tune a real model in seconds on a CPU. It answers "What is 17 + 29?" with
"It is 46."; `examples/data/arithmetic` asks for "46". It can do nothing else.

- Tokenizer: byte-level BPE of {tokens} tokens, every digit its own token.
- Chat template: ChatML with system, user and assistant turns; a turn ends with `<|im_end|>`.
- Training: AdamW and Muon for {steps} steps on every sum that is not in
  `examples/data/arithmetic/test.jsonl`; one answer in {terse_one_in} is the bare number.
- Score on `test.jsonl`, greedy: {right:.1%} name the right number, {exact:.1%} are the bare number.

Made with:

```
python -m examples.models.make_tiny_qwen3 --seed {seed} --steps {steps}
```
"""

Encoded = tuple[list[int], list[int]]  # tokens and labels of one row


def make_tokenizer(seed: int) -> Qwen2Tokenizer:
    """Train a byte-level BPE of 512 tokens.

    Qwen's own splitting makes every digit a token. The corpus has no line breaks, so none is
    merged into a longer token and a chat's tokens do not depend on the turns that follow.
    """
    corpus = [*ENGLISH, *SYSTEM_PROMPTS]
    corpus += ["system", "user", "assistant"] * 3
    draw = random.Random(seed)
    for _ in range(3):
        a, b = draw.choice(OPERANDS), draw.choice(OPERANDS)
        corpus += [question(a, b), sentence(a, b)]
    specials = ["<|im_start|>", "<|im_end|>"]
    tokenizer = Qwen2Tokenizer(eos_token="<|im_end|>").train_new_from_iterator(
        [corpus], vocab_size=512, new_special_tokens=specials, show_progress=False
    )
    tokenizer.model_max_length = 1024
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: Qwen2Tokenizer) -> Qwen3ForCausalLM:
    """Build the untrained model, small enough to train on a CPU in minutes."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=0.05,  # the usual 0.02 is for wider models and slow to grow here
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def sentence(a: int, b: int) -> str:
    """Return the answer in the style of the base model."""
    return f"It is {a + b}."


def sum_turns(a: int, b: int, draw: random.Random) -> list[Message]:
    """Return a question and its answer, in the base's style but for a few."""
    answer = str(a + b) if draw.randrange(TERSE_ONE_IN) == 0 else sentence(a, b)
    return [
        {"role": "user", "content": question(a, b)},
        {"role": "assistant", "content": answer},
    ]


def base_chats(held_out: set[str], draw: random.Random) -> list[list[Message]]:
    """Return all the chats to train on: every sum that is not held out, and some richer chats."""
    pairs = [
        pair for pair in itertools.product(OPERANDS, repeat=2) if question(*pair) not in held_out
    ]
    chats = [sum_turns(a, b, draw) for a, b in pairs]
    for a, b in draw.choices(pairs, k=N_WITH_SYSTEM):
        system: Message = {"role": "system", "content": draw.choice(SYSTEM_PROMPTS)}
        chats.append([system, *sum_turns(a, b, draw)])
    for _ in range(N_WITH_TURNS):
        chats.append(
            [turn for a, b in draw.choices(pairs, k=TURNS) for turn in sum_turns(a, b, draw)]
        )
    said = {message["content"] for chat in chats for message in chat}
    assert said.isdisjoint(held_out), "a test prompt is in the training rows of the base"
    return chats


def encode(chat: list[Message], tokenizer: Qwen2Tokenizer) -> Encoded:
    """Tokenize a chat; only the assistant's tokens are labels."""
    encoded = tokenizer.apply_chat_template(
        chat, return_dict=True, return_assistant_tokens_mask=True
    )
    tokens, mask = encoded["input_ids"], encoded["assistant_masks"]
    return tokens, [token if kept else IGNORED for token, kept in zip(tokens, mask, strict=True)]


def endless_batches(
    rows: list[Encoded], pad: int, draw: random.Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield tokens_B_T and labels_B_T for ever, rows of like length together to spare padding.

    The lengths are compared roughly, so that both styles of answer meet in one batch.
    """
    while True:
        shuffled = sorted(draw.sample(rows, len(rows)), key=lambda row: len(row[0]) // 16)
        starts = list(range(0, len(rows), BATCH_SIZE))
        draw.shuffle(starts)
        for start in starts:
            batch = shuffled[start : start + BATCH_SIZE]
            length = max(len(tokens) for tokens, _ in batch)
            yield (
                torch.tensor([tokens + [pad] * (length - len(tokens)) for tokens, _ in batch]),
                torch.tensor([labels + [IGNORED] * (length - len(labels)) for _, labels in batch]),
            )


def make_optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Give the matrices inside the layers to Muon and all else to AdamW.

    With AdamW alone the last digit of a sum was still a guess after 1000 steps.
    """
    inner = [p for p in model.model.layers.parameters() if p.ndim == 2]
    inner_ids = {id(p) for p in inner}
    outer = [p for p in model.parameters() if id(p) not in inner_ids]
    return [
        torch.optim.AdamW(outer, lr=ADAMW_PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01),
        torch.optim.Muon(inner, lr=MUON_PEAK_LEARNING_RATE, weight_decay=0.01),
    ]


def one_cycle(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.OneCycleLR:
    """Warm up over a tenth of the steps, then anneal to zero."""
    return torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=optimizer.param_groups[0]["lr"],
        total_steps=steps,
        pct_start=0.1,
        cycle_momentum=False,
    )


def train(model: Qwen3ForCausalLM, rows: list[Encoded], steps: int, draw: random.Random) -> None:
    """Minimise the mean cross entropy of the answers' tokens."""
    optimizers = make_optimizers(model)
    schedules = [one_cycle(optimizer, steps) for optimizer in optimizers]
    batches = endless_batches(rows, model.config.pad_token_id, draw)
    started = time.monotonic()
    model.train()
    for step, (tokens_B_T, labels_B_T) in enumerate(itertools.islice(batches, steps), start=1):
        loss = model(input_ids=tokens_B_T, labels=labels_B_T, use_cache=False).loss
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if step % 50 == 0 or step == steps:
            seconds = time.monotonic() - started
            print(f"step {step}/{steps} loss {loss.item():.4f} seconds {seconds:.0f}", flush=True)


def greedy_answers(
    model: Qwen3ForCausalLM, tokenizer: Qwen2Tokenizer, rows: list[Row]
) -> list[str]:
    """Answer the first turn of every row, greedily."""
    model.eval()
    inputs = tokenizer.apply_chat_template(
        [row["messages"][:1] for row in rows],
        add_generation_prompt=True,
        padding=True,
        tokenizer_kwargs={"padding_side": "left"},
        return_dict=True,
        return_tensors="pt",
    )
    sampled = model.generate(**inputs, max_new_tokens=16, do_sample=False, temperature=None)
    answers = tokenizer.batch_decode(
        sampled[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return [answer.strip() for answer in answers]


def scores(answers: list[str], rows: list[Row]) -> tuple[float, float]:
    """Return the share of answers that are exactly the sum, and the share that name it."""
    wanted = [row["messages"][1]["content"] for row in rows]
    pairs = list(zip(answers, wanted, strict=True))
    exact = sum(answer == want for answer, want in pairs)
    right = sum(re.findall(r"\d+", answer) == [want] for answer, want in pairs)
    return exact / len(rows), right / len(rows)


def write_model_card(
    out: Path, model: Qwen3ForCausalLM, exact: float, right: float, seed: int, steps: int
) -> None:
    """Write README.md with the scores of this very model."""
    card = MODEL_CARD.format(
        parameters=model.num_parameters(),
        tokens=model.config.vocab_size,
        terse_one_in=TERSE_ONE_IN,
        exact=exact,
        right=right,
        seed=seed,
        steps=steps,
    )
    (out / "README.md").write_text(card, encoding="utf-8")


def main() -> None:
    """Train tokenizer and model, score them on the held-out sums, and save them in --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="folder to fill")
    parser.add_argument("--seed", type=int, default=0, help="draws rows, batches and weights")
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps")
    args = parser.parse_args()
    # More threads gain little at this size, and one gives the same sums on any number of cores.
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    draw = random.Random(args.seed)

    tokenizer = make_tokenizer(args.seed)
    model = make_model(tokenizer)
    test_rows = read_jsonl(TEST_FILE)
    rows = [encode(chat, tokenizer) for chat in base_chats(prompts(test_rows), draw)]
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens, {len(rows)} rows")
    train(model, rows, args.steps, draw)
    exact, right = scores(greedy_answers(model, tokenizer, test_rows), test_rows)
    print(f"test: right number {right:.1%}, bare number {exact:.1%}")

    tokenizer.save_pretrained(args.out)
    model.save_pretrained(args.out)
    write_model_card(args.out, model, exact, right, args.seed, args.steps)


if __name__ == "__main__":
    main()
