"""Rows: where they come from, what they may look like, and in which order a run sees them.

Two shapes of rows, with the names that TRL gives them:

    {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}
    {"prompt": "1+1=", "completion": "2"}      (strings, or two lists of messages)

A chat row may hold `tools`, which are handed to the chat template.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from backends.errors import Problem, UserError
from backends.registry import Registry

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Row = dict[str, Any]
Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
SHOWN_PROBLEMS = 20
EXAMPLE_ROW = (
    '{"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}'
)


@dataclass(frozen=True)
class Dataset:
    """Rows in their order, a fingerprint of them, and where each came from (`file:line`)."""

    rows: list[Row]
    places: list[str] = field(repr=False)
    source: str
    unreadable: list[Problem] = field(default_factory=list, repr=False)
    """Lines that are no rows; `load_dataset` gives out no set that has any."""

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the rows as canonical JSON, one a line: the same rows in the same order."""
        digest = hashlib.sha256()
        for row in self.rows:
            text = json.dumps(row, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
            digest.update(text.encode("utf-8", "surrogatepass") + b"\n")
        return digest.hexdigest()

    def head(self, limit: int | None) -> Dataset:
        """The first `limit` rows; all of them for None."""
        return Dataset(self.rows[:limit], self.places[:limit], self.source, self.unreadable)


# --- where rows come from -----------------------------------------------------------------------


class DataSource(BaseModel):
    """A `data:` section: a kind, its fields, and how its rows are read."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str

    def load(self, where: str = "data") -> Dataset:
        """Read all rows; those that are no rows at all are noted in `Dataset.unreadable`.

        Raises UserError if the source itself cannot be read; `where` names this section.
        """
        raise NotImplementedError


class JsonlData(DataSource):
    """JSON lines: one row on each line of one or more files."""

    model_config = ConfigDict(title="jsonl")

    kind: Literal["jsonl"] = "jsonl"
    path: str | list[str] = Field(
        description="A file or a list of files: paths relative to the working directory, "
        "absolute ones, or s3:// addresses.",
        examples=["examples/data/arithmetic/train.jsonl"],
    )

    def load(self, where: str = "data") -> Dataset:
        """Read the files in the order they are given."""
        paths = [self.path] if isinstance(self.path, str) else self.path
        rows: list[Row] = []
        places: list[str] = []
        problems: list[Problem] = []
        for path in paths:
            for number, line in enumerate(_read(path, f"{where}.path").split(b"\n"), start=1):
                if not line.strip():
                    continue
                row = _parse_row(line, f"{path}:{number}")
                if isinstance(row, Problem):
                    problems.append(row)
                else:
                    rows.append(row)
                    places.append(f"{path}:{number}")
        source = ", ".join(paths)
        return _not_empty(Dataset(rows, places, source, problems), f"{where}.path")


class RowsData(DataSource):
    """Rows written into the experiment itself."""

    model_config = ConfigDict(title="rows")

    kind: Literal["rows"] = "rows"
    rows: list[Row] = Field(description="The rows, shaped like the lines of a jsonl file.")

    def load(self, where: str = "data") -> Dataset:
        """The rows as they are."""
        places = [f"{where}.rows[{index}]" for index in range(len(self.rows))]
        return _not_empty(Dataset(list(self.rows), places, f"{where}.rows"), f"{where}.rows")


DATA_SOURCES: Registry[type[DataSource]] = Registry(
    "data source",
    "flowtune.data",
    {"jsonl": "algorithms.data.dataset:JsonlData", "rows": "algorithms.data.dataset:RowsData"},
)


def load_dataset(source: DataSource, where: str = "data") -> Dataset:
    """The rows of a `data:` section. Raises UserError; `where` names the section in it."""
    dataset = source.load(where)
    if dataset.unreadable:
        raise UserError(*shorten(dataset.unreadable))
    return dataset


def shorten(problems: list[Problem]) -> list[Problem]:
    """The first problems and, if there are more, one that counts the rest."""
    if len(problems) <= SHOWN_PROBLEMS:
        return problems
    rest = len(problems) - SHOWN_PROBLEMS
    file = problems[SHOWN_PROBLEMS].where.rpartition(":")[0] or problems[0].where
    return [
        *problems[:SHOWN_PROBLEMS],
        Problem(file, f"{rest} more bad rows ({len(problems)} in all)", "mend those above first"),
    ]


def _not_empty(dataset: Dataset, where: str) -> Dataset:
    if not dataset.rows and not dataset.unreadable:
        raise UserError(
            Problem(where, f"{dataset.source} holds no rows", f"one row a line, as {EXAMPLE_ROW}")
        )
    return dataset


def _read(path: str, where: str) -> bytes:
    try:
        if "://" not in path:
            return Path(path).expanduser().read_bytes()
        import fsspec

        with fsspec.open(path, "rb") as file:
            content: bytes = file.read()
        return content
    except FileNotFoundError:
        raise UserError(Problem(where, f"there is no file {path}", nearest_file(path))) from None
    except (OSError, ImportError, ValueError) as error:
        raise UserError(
            Problem(where, f"{path} cannot be read ({error})", "give a readable file")
        ) from error


def nearest_file(path: str) -> str:
    """The remedy for a file that is not there: one of a similar name, or where we looked."""
    folder = Path(path).expanduser().parent
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    near = difflib.get_close_matches(Path(path).name, names, n=1)
    if near:
        return f"did you mean {folder / near[0]}?"
    if "://" in path:
        return "check the address and the credentials"
    return f"paths are relative to the working directory, {Path.cwd()}"


def _parse_row(line: bytes, place: str) -> Row | Problem:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Problem(place, f"not UTF-8 text ({error.reason})", "save the file as UTF-8")
    except json.JSONDecodeError as error:
        return Problem(
            place,
            f"not JSON: {error.msg} at column {error.colno}",
            "a jsonl file holds one whole JSON object on each line",
        )
    if not isinstance(row, dict):
        kind = type(row).__name__
        return Problem(place, f"a {kind}, not an object", f"a row looks like {EXAMPLE_ROW}")
    return row


# --- what a row may look like -------------------------------------------------------------------


@dataclass(frozen=True)
class Conversation:
    """A chat row; assistant turns before `first_supervised` are context only."""

    messages: list[Message]
    first_supervised: int
    tools: list[Any] | None


@dataclass(frozen=True)
class PlainText:
    """A prompt and its completion as text, without a chat template."""

    prompt: str
    completion: str


def read_example(row: Row) -> Conversation | PlainText:
    """A row that `row_problem` has nothing against, in the shape it has.

    Of a prompt and completion given as messages only the completion's turns are supervised.
    """
    tools = row.get("tools")
    if "messages" in row:
        return Conversation(row["messages"], 0, tools)
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str):
        return PlainText(prompt, completion)
    return Conversation([*prompt, *completion], len(prompt), tools)


def expected_answer(row: Row) -> str:
    """What the last assistant turn, or the completion, says."""
    example = read_example(row)
    if isinstance(example, PlainText):
        return example.completion
    return str(example.messages[last_assistant(example.messages)].get("content") or "")


def last_assistant(messages: list[Message]) -> int:
    """The index of the last assistant turn; -1 if there is none."""
    return max((i for i, turn in enumerate(messages) if turn["role"] == "assistant"), default=-1)


def row_problem(row: Row, place: str) -> Problem | None:
    """What is wrong with a row to be learned from: its shape, its turns. None if nothing."""
    if "messages" in row:
        if "prompt" in row or "completion" in row:
            return Problem(place, "has messages and prompt/completion", "keep one of the two")
        return _messages_problem(row["messages"], "messages", place) or _turns_problem(
            row["messages"], 0, place
        )
    missing = [name for name in ("prompt", "completion") if name not in row]
    if len(missing) == 2:
        keys = ", ".join(map(repr, row)) or "nothing"
        return Problem(
            place,
            f"has neither messages nor prompt and completion, but {keys}",
            f"a row looks like {EXAMPLE_ROW}",
        )
    if missing:
        return Problem(place, f"{missing[0]} is missing", "give both prompt and completion")
    return _pair_problem(row["prompt"], row["completion"], place)


def _pair_problem(prompt: Any, completion: Any, place: str) -> Problem | None:
    if isinstance(prompt, str) and isinstance(completion, str):
        if not prompt:
            return Problem(place, "prompt is empty", "give the text that the completion follows")
        return None
    if isinstance(prompt, str) or isinstance(completion, str):
        kinds = f"a {type(prompt).__name__} and a {type(completion).__name__}"
        return Problem(
            place, f"prompt and completion are {kinds}", "two strings, or two lists of messages"
        )
    return (
        _messages_problem(prompt, "prompt", place)
        or _messages_problem(completion, "completion", place)
        or _turns_problem([*prompt, *completion], len(prompt), place)
    )


def _messages_problem(messages: Any, name: str, place: str) -> Problem | None:
    if not isinstance(messages, list) or not messages:
        return Problem(
            place, f"{name} is {_short(messages)}", f"a list of turns, as in {EXAMPLE_ROW}"
        )
    for index, turn in enumerate(messages):
        where = f"{name}[{index}]"
        if not isinstance(turn, dict):
            return Problem(
                place,
                f"{where} is {_short(turn)}",
                'a turn is an object with "role" and "content"',
            )
        role = turn.get("role")
        if role not in ROLES:
            near = difflib.get_close_matches(str(role), ROLES, n=1)
            what = f"{where}.role is {_short(role)}" if "role" in turn else f"{where} has no role"
            remedy = f"did you mean {near[0]!r}?" if near else f"roles are {', '.join(ROLES)}"
            return Problem(place, what, remedy)
        content = turn.get("content")
        if not isinstance(content, str) and not (content is None and turn.get("tool_calls")):
            what = (
                f"{where}.content is {_short(content)}"
                if "content" in turn
                else f"{where} has no content"
            )
            return Problem(place, what, "content is a string")
    return None


def _turns_problem(messages: list[Message], first_supervised: int, place: str) -> Problem | None:
    roles = [turn["role"] for turn in messages]
    if "assistant" not in roles[first_supervised:]:
        part = "completion" if first_supervised else "messages"
        return Problem(
            place,
            f"{part} has no assistant turn, so there is nothing to learn from",
            'add a turn {"role": "assistant", "content": …} or remove the row',
        )
    opening = next(role for role in roles if role not in ("system", "developer"))
    if opening == "assistant":
        return Problem(
            place, "starts with an assistant turn: it answers nothing", "put a user turn before it"
        )
    return None


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else text[:57] + "…"


def dataset_problems(
    dataset: Dataset, check: Callable[[Row, str], Problem | None] = row_problem
) -> list[Problem]:
    """What is wrong: lines that are no rows, then each row that will not do."""
    checked = (check(row, place) for row, place in zip(dataset.rows, dataset.places, strict=True))
    return [*dataset.unreadable, *(problem for problem in checked if problem is not None)]


# --- in which order -----------------------------------------------------------------------------


def steps_per_epoch(n_rows: int, batch_size: int) -> int:
    """Steps of one pass: every row once, so the last batch of an epoch may be smaller."""
    return -(-n_rows // batch_size)


@lru_cache(maxsize=4)
def epoch_order(n_rows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order of the rows in an epoch (from 0), [n_rows]: a pure function of its arguments.

    Rows are sorted by raw 64-bit draws of PCG64 seeded with (seed, epoch). NumPy promises these
    draws never to change, which it does not promise of `Generator.permutation`.
    """
    import numpy as np

    draws = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n_rows)
    order = np.argsort(draws, kind="stable")
    order.flags.writeable = False
    return order


def batch_rows(n_rows: int, batch_size: int, seed: int, step: int) -> list[int]:
    """The rows of a step (from 0). Steps beyond an epoch go on with the next epoch's order."""
    epoch, index = divmod(step, steps_per_epoch(n_rows, batch_size))
    order = epoch_order(n_rows, seed, epoch)
    picked: list[int] = order[index * batch_size : (index + 1) * batch_size].tolist()
    return picked
