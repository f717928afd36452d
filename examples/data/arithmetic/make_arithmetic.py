"""Write the arithmetic chat data: sums of two-digit numbers, answered with the bare number.

The task is small enough for a CPU and exact enough to score: an answer is right when it is the
sum and nothing else. The same seed always gives the same bytes, so the files can be committed.
"""

import argparse
import itertools
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict

OPERANDS = range(10, 100)
N_TRAIN = 3200  # one hundred batches of 32
N_TEST = 200


class Message(TypedDict):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


class Row(TypedDict):
    """One line of a chat file."""

    messages: list[Message]


def question(a: int, b: int) -> str:
    """Return the prompt; the base model is trained on the same words, so they are only here."""
    return f"What is {a} + {b}?"


def chat_row(a: int, b: int) -> Row:
    """Return one sum as a chat whose answer is the bare number."""
    return {
        "messages": [
            {"role": "user", "content": question(a, b)},
            {"role": "assistant", "content": str(a + b)},
        ]
    }


def prompts(rows: list[Row]) -> set[str]:
    """Return the first turn of every row."""
    return {row["messages"][0]["content"] for row in rows}


def split_rows(seed: int) -> tuple[list[Row], list[Row]]:
    """Draw the train and test rows without replacement, so that no prompt is in both."""
    pairs = list(itertools.product(OPERANDS, repeat=2))
    drawn = random.Random(seed).sample(pairs, N_TRAIN + N_TEST)
    rows = [chat_row(a, b) for a, b in drawn]
    train, test = rows[:N_TRAIN], rows[N_TRAIN:]
    assert prompts(train).isdisjoint(prompts(test)), "a test prompt is also in train"
    return train, test


def write_jsonl(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write one JSON object a line, with the same line ends on every platform."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8", newline="\n")


def read_jsonl(path: Path) -> list[Row]:
    """Read the rows that `write_jsonl` wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    """Write train.jsonl and test.jsonl into the folder of --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to fill")
    parser.add_argument("--seed", type=int, default=0, help="draws the sums of both files")
    args = parser.parse_args()
    train, test = split_rows(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    write_jsonl(args.out / "train.jsonl", train)
    write_jsonl(args.out / "test.jsonl", test)
    print(f"wrote {len(train)} train rows and {len(test)} test rows to {args.out}")


if __name__ == "__main__":
    main()
