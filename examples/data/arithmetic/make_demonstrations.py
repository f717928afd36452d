"""Write demonstrations.jsonl: from it the tiny model learns to take a demonstration for an example.

Every second sum comes with a demonstration, and is answered with the bare number; the others come
without one, and are answered as the tiny model always does ("It is 46."). After that a model knows
the style of the data when it is shown an answer, and not without: what self-distillation needs.
"""

import argparse
import random
from pathlib import Path

from examples.data.arithmetic.make_arithmetic import Row, read_jsonl, write_jsonl

FOLDER = Path(__file__).parent
N_ROWS = 1600


def demonstrated(question: str, answer: str) -> str:
    """A question with its answer shown; examples/sdft_arithmetic.yaml has the same words."""
    return f"{question} (A good answer: {answer})"


def row_of(row: Row, shown: bool) -> Row:
    """A sum with a demonstration and the bare number, or without one and in a sentence."""
    (user, assistant) = row["messages"]
    question, answer = user["content"], assistant["content"]
    prompt = demonstrated(question, answer) if shown else question
    said = answer if shown else f"It is {answer}."
    return Row(messages=[{**user, "content": prompt}, {**assistant, "content": said}])


def main() -> None:
    """Write demonstrations.jsonl from train.jsonl, and demonstrated_test.jsonl from test.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write into")
    parser.add_argument("--seed", type=int, default=0, help="draws the sums")
    args = parser.parse_args()
    sums = random.Random(args.seed).sample(read_jsonl(FOLDER / "train.jsonl"), N_ROWS)
    rows = [row_of(row, shown=index % 2 == 1) for index, row in enumerate(sums)]
    write_jsonl(args.out / "demonstrations.jsonl", rows)
    test = [row_of(row, shown=True) for row in read_jsonl(FOLDER / "test.jsonl")]
    write_jsonl(args.out / "demonstrated_test.jsonl", test)
    print(f"wrote {len(rows)} rows and {len(test)} test rows to {args.out}")


if __name__ == "__main__":
    main()
