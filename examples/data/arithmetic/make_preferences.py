"""Write preferences.jsonl: of two right answers to a sum, the bare number is the better one.

The worse one is what the tiny model says by itself ("It is 46."). A model between the two styles
cannot tell them apart, and learns to from these pairs.
"""

import argparse
import random
from pathlib import Path
from typing import TypedDict

from examples.data.arithmetic.make_arithmetic import Message, Row, read_jsonl, write_jsonl

FOLDER = Path(__file__).parent
N_ROWS = 1600


class Pair(TypedDict):
    """One line of a preference file."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]


def pair_of(row: Row) -> Pair:
    """A sum with both answers."""
    user, assistant = row["messages"]
    sentence: Message = {"role": "assistant", "content": f"It is {assistant['content']}."}
    return Pair(prompt=[user], chosen=[assistant], rejected=[sentence])


def main() -> None:
    """Write preferences.jsonl from train.jsonl, and preferences_test.jsonl from test.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write into")
    parser.add_argument("--seed", type=int, default=0, help="draws the sums")
    args = parser.parse_args()
    sums = random.Random(args.seed).sample(read_jsonl(FOLDER / "train.jsonl"), N_ROWS)
    pairs = [pair_of(row) for row in sums]
    write_jsonl(args.out / "preferences.jsonl", pairs)
    test = [pair_of(row) for row in read_jsonl(FOLDER / "test.jsonl")]
    write_jsonl(args.out / "preferences_test.jsonl", test)
    print(f"wrote {len(pairs)} pairs and {len(test)} test pairs to {args.out}")


if __name__ == "__main__":
    main()
