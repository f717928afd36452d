"""Write the data of the guessing game: a number from 1 to 3, two guesses, a hint after the first.

`games.jsonl` are games of somebody who guesses blindly: a model that is fine-tuned on them knows
how to play and nothing of how to win, and hits in 5 games of 9. Who guesses 2 first and listens to
the hint always does. `train.jsonl` and `test.jsonl` hold numbers to be guessed.
"""

import argparse
import json
import random
from pathlib import Path

FOLDER = Path(__file__).parent
NUMBERS = (1, 2, 3)
N_GAMES = 900
N_TRAIN = 96
N_TEST = 60


def game(number: int, draw: random.Random) -> dict[str, list[dict[str, str]]]:
    """One game of blind guesses, in the words of the environment `guess_number`."""
    messages = [{"role": "user", "content": "Guess my number from 1 to 3."}]
    for turn in range(2):
        guess = draw.choice(NUMBERS)
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == number:
            break
        if turn == 0:
            hint = "Higher." if guess < number else "Lower."
            messages.append({"role": "user", "content": hint})
    return {"messages": messages}


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """One JSON object a line, the same bytes on every platform."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8", newline="\n")


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write into")
    parser.add_argument("--seed", type=int, default=0, help="draws games")
    args = parser.parse_args()
    draw = random.Random(args.seed)
    write(
        args.out / "games.jsonl", [dict(game(draw.choice(NUMBERS), draw)) for _ in range(N_GAMES)]
    )
    for name, count in (("train", N_TRAIN), ("test", N_TEST)):
        rows: list[dict[str, object]] = [
            {"number": NUMBERS[index % len(NUMBERS)]} for index in range(count)
        ]
        write(args.out / f"{name}.jsonl", rows)


if __name__ == "__main__":
    main()
