"""What a run never does twice: batches that it sampled from its own weights, and evaluations.

They are kept in the run's store under what decides them, so that a replay finds them again and
anything that has changed does not:

- an on-policy batch under the lineage of the weights it was sampled from, and the step;
- an evaluation under the lineage of the weights, the steps done, its settings and rows, and the
  code of its verifier.

The lineage says which weights those are: the experiment, its data and the algorithm's code, and
where a run went on under other code, from which step. A kept batch is safe in the store before
anything is trained on it, so the weights of a lineage after so many steps are always the same.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from algorithms.base import BaseAlgorithm, TrainingBatch, Transcript
from algorithms.evaluators import EvaluationResult, PreparedEvaluation, read_result
from backends.storage.documents import plain
from backends.storage.run_store import RunStore

if TYPE_CHECKING:
    import tinker

LINEAGE = "lineage"
"""Where a checkpoint's algorithm state has it."""

BATCH = "build_batch"
"""What the names of kept batches begin with."""


@dataclass(frozen=True)
class Lineage:
    """Which weights a step's number means; `made_by` is what trains from here on."""

    name: str
    made_by: str

    @classmethod
    def begin(cls, made_by: str) -> Lineage:
        """That of a run from its first step."""
        return cls(_digest(made_by), made_by)

    def go_on(self, made_by: str, step: int) -> Lineage:
        """That of a run which continues after `step` steps: another one, if the code is another."""
        if made_by == self.made_by:
            return self
        return Lineage(_digest(self.name, step, made_by), made_by)


class Kept:
    """The kept results of one run; found are those of the last `look`, and batches kept since."""

    def __init__(self, store: RunStore, lineage: Lineage) -> None:
        self._store = store
        self.lineage = lineage
        self._found: set[str] = set()
        self._expired = 0

    def look(self) -> None:
        """List what there is, so that asking for what is not there costs nothing. Blocks."""
        self._found = set(self._store.kept_names())

    def has_batch(self, step: int) -> bool:
        """Whether a replay finds the batch of a step."""
        return self.batch_name(step) in self._found

    def has_evaluation(self, prepared: PreparedEvaluation, steps_done: int) -> bool:
        """Whether an evaluation after so many steps was done before."""
        return self.evaluation_name(prepared, steps_done) in self._found

    def batch_name(self, step: int) -> str:
        """The object of a step's batch."""
        return f"{BATCH}-{_digest('build_batch', asdict(self.lineage), step)}.safetensors"

    def read_batch(self, step: int) -> TrainingBatch | None:
        """The batch that was kept for a step, or None. Blocks."""
        data = self._store.kept(self.batch_name(step))
        return None if data is None else decode_batch(data)

    def keep_batch(self, step: int, batch: TrainingBatch) -> None:
        """Keep a step's batch. One under a callable loss, or with images, cannot be. Blocks."""
        if not callable(batch.loss_fn) and all(map(_only_text, batch.data)):
            self._store.keep(self.batch_name(step), encode_batch(batch))
            self._found.add(self.batch_name(step))

    def expire(self) -> None:
        """Remove the batches that no replay asks for: of steps behind all but two checkpoints.

        The run goes on from the newest; the one before it is there for the case that someone has
        to remove the newest. Evaluations stay, they are small. Blocks.
        """
        if not any(name.startswith(BATCH) for name in tuple(self._found)):
            return
        before = [0, 0, *self._store.checkpoint_steps()][-2]
        names = [self.batch_name(step) for step in range(self._expired, before)]
        self._store.forget(name for name in names if name in self._found)
        self._found.difference_update(names)
        self._expired = max(self._expired, before)

    def evaluation_name(self, prepared: PreparedEvaluation, steps_done: int) -> str:
        """The object of an evaluation after so many steps."""
        what = (prepared.fingerprint, [code_version(item) for item in prepared.code()])
        return f"evaluate-{_digest('evaluate', asdict(self.lineage), steps_done, what)}.json"

    def read_evaluation(
        self, prepared: PreparedEvaluation, steps_done: int
    ) -> EvaluationResult | None:
        """The result that was kept, or None. Blocks."""
        data = self._store.kept(self.evaluation_name(prepared, steps_done))
        if data is None:
            return None
        return read_result(json.loads(data))

    def keep_evaluation(self, prepared: PreparedEvaluation, result: EvaluationResult) -> None:
        """Keep an evaluation's result. Blocks."""
        data = json.dumps(asdict(result), ensure_ascii=False).encode("utf-8", "surrogatepass")
        self._store.keep(self.evaluation_name(prepared, result.step), data)


def made_by(experiment: Mapping[str, Any], data_fingerprint: str, algorithm: BaseAlgorithm) -> str:
    """What decides a run's weights, step for step: its settings, its rows, its algorithm's code."""
    code = [code_version(item) for item in algorithm.code()]
    return _digest(experiment, data_fingerprint, code)


def code_version(item: object) -> str:
    """sha256 of the source that an object comes from: whole packages, as helpers count too."""
    kind = item if isinstance(item, type) or inspect.isroutine(item) else type(item)
    classes = kind.__mro__ if isinstance(kind, type) else [kind]
    modules = {cls.__module__ for cls in classes} - {"builtins", "abc", "typing"}
    return _digest(sorted(_source_version(module) for module in modules))


@cache
def _source_version(module: str) -> str:
    """sha256 of a module's file, or of all the files of the package at its root."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return _digest(module)
    package = sys.modules.get(module.partition(".")[0])
    roots = [Path(folder) for folder in getattr(package, "__path__", [])]
    files = sorted(path for root in roots for path in root.rglob("*.py")) or [Path(file)]
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _digest(*parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


# --- a batch as safetensors ---------------------------------------------------------------------


def _only_text(datum: tinker.Datum) -> bool:
    return all(chunk.type == "encoded_text" for chunk in datum.model_input.chunks)


def _tokens(chunk: Any) -> list[int]:
    return list(chunk.tokens)


def encode_batch(batch: TrainingBatch) -> bytes:
    """A batch as one safetensors file: tensors by datum, the rest as JSON in its header.

    Tensors are `<datum>/<name>` for each loss input, with `/rows` and `/columns` beside it for a
    sparse one, and `<datum>/model_input/<chunk>` for each chunk of tokens.
    """
    import numpy as np
    from safetensors.numpy import save

    tensors: dict[str, Any] = {}
    datums = []
    for index, datum in enumerate(batch.data):
        for place, chunk in enumerate(datum.model_input.chunks):
            tensors[f"{index}/model_input/{place}"] = np.asarray(_tokens(chunk), np.int64)
        inputs = {}
        for name, tensor in datum.loss_fn_inputs.items():
            sparse = tensor.sparse_crow_indices is not None
            inputs[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "sparse": sparse}
            tensors[f"{index}/{name}"] = np.asarray(tensor.data, tensor.dtype)
            if sparse:
                tensors[f"{index}/{name}/rows"] = np.asarray(tensor.sparse_crow_indices, np.int64)
                tensors[f"{index}/{name}/columns"] = np.asarray(tensor.sparse_col_indices, np.int64)
        datums.append({"chunks": len(datum.model_input.chunks), "loss_fn_inputs": inputs})
    header = {
        "loss_fn": batch.loss_fn,
        "loss_fn_config": batch.loss_fn_config,
        "metrics": plain(batch.metrics),
        "transcripts": [asdict(transcript) for transcript in batch.transcripts],
        "data": datums,
    }
    data: bytes = save(tensors, {"batch": json.dumps(header)})
    return data


def decode_batch(data: bytes) -> TrainingBatch:
    """The batch that `encode_batch` wrote."""
    from safetensors.numpy import load

    header = _header(data)
    tensors = load(data)
    datums = [_datum(tensors, index, parts) for index, parts in enumerate(header["data"])]
    return TrainingBatch(
        datums,
        header["loss_fn"],
        header["loss_fn_config"],
        {name: math.nan if value is None else value for name, value in header["metrics"].items()},
        [Transcript(**transcript) for transcript in header["transcripts"]],
    )


def _header(data: bytes) -> dict[str, Any]:
    """The JSON of `encode_batch` (a safetensors file begins with its header's length and JSON)."""
    length = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    batch: dict[str, Any] = json.loads(header["__metadata__"]["batch"])
    return batch


def _datum(tensors: Mapping[str, Any], index: int, parts: Mapping[str, Any]) -> tinker.Datum:
    import tinker
    from tinker import types as tinker_types

    chunks = [
        tinker_types.EncodedTextChunk(tokens=tensors[f"{index}/model_input/{place}"].tolist())
        for place in range(parts["chunks"])
    ]
    inputs = {}
    for name, about in parts["loss_fn_inputs"].items():
        sparse: dict[str, Any] = {}
        if about["sparse"]:
            sparse = {
                "sparse_crow_indices": tensors[f"{index}/{name}/rows"].tolist(),
                "sparse_col_indices": tensors[f"{index}/{name}/columns"].tolist(),
            }
        inputs[name] = tinker.TensorData(
            data=tensors[f"{index}/{name}"], dtype=about["dtype"], shape=about["shape"], **sparse
        )
    model_input = tinker_types.ModelInput(chunks=list(chunks))
    return tinker.Datum(model_input=model_input, loss_fn_inputs=inputs)
