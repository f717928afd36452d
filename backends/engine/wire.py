"""The Tinker protocol's bodies: protobuf and JSON in, records out, and results back to bytes.

Shapes follow `tinker/proto` and `tinker/types` of the pinned SDK. Tensors go from the body to numpy
without a Python list in between. Nothing here knows of HTTP, models or the order of requests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, Final, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import zstandard
from google.protobuf.message import DecodeError
from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json
from tinker.proto import tinker_public_pb2 as pb

from backends.engine.records import (
    AdamParams,
    Datum,
    FloatArray,
    IntArray,
    LoraConfig,
    PassOutput,
    SampleOutput,
    SampleRequest,
    SamplingParams,
)

PROTOBUF: Final = "application/x-protobuf"
"""The media type of results that are not JSON."""
MAX_BODY_BYTES: Final = 64 * 2**20
"""The largest body that is read, and the most that a compressed one may unfold to. Clients send at
most `fwdbwd_max_chunk_bytes_count`; protobuf's objects may take 30 times a body's room."""
MAX_PARTS: Final = 2**18
"""Most datums, chunks and tensors of one request, all told: each costs time, even an empty one."""
MAX_CELLS: Final = 2**27
"""Most tensor elements of one request, once sparse ones are dense."""
MOST: Final = 2**31 - 1
"""More tokens than any vocabulary or context has; backends may keep counts and ids in 32 bits."""
MAX_SAMPLES: Final = 4096
"""Most samples of one request."""
_NO_LOGPROB: Final = -99999.0
"""What the protocol puts in a top-k cell that holds nothing."""

Array = npt.NDArray[np.generic]
B = TypeVar("B", bound="Body")


class BadBody(ValueError):
    """A body that cannot be read; model and number are set if at least those were found."""

    def __init__(self, message: str, model_id: str | None = None, seq_id: int | None = None):
        super().__init__(message)
        self.model_id = model_id
        self.seq_id = seq_id


# -- JSON requests -----------------------------------------------------------------------------

MAX_SEQ_ID: Final = 2**62


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


SeqId = Annotated[int, Field(ge=0, lt=MAX_SEQ_ID)]
TtlSeconds = Annotated[int, Field(ge=3600, le=10 * 365 * 86400)]
Tags = dict[str, Annotated[str, BeforeValidator(_as_text, json_schema_input_type=Any)]]
"""What a user notes. The protocol tells it as texts, so anything else is kept as its JSON."""


class Body(BaseModel):
    """Base of every JSON request: nothing is converted, no number is infinite or NaN.

    Fields that a newer SDK adds are passed over.
    """

    model_config = ConfigDict(
        extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class CreateSession(Body):
    """Opens a session; what it made is freed when it ends."""

    tags: list[str] = []
    user_metadata: Tags | None = None
    sdk_version: str = ""
    display_name: str | None = None


class OfSession(Body):
    """Names a session."""

    session_id: str


class OfModel(Body):
    """Names a model."""

    model_id: str


class Numbered(OfModel):
    """An operation on a model, in the order of `seq_id`."""

    seq_id: SeqId | None = None


class LoraBody(Body):
    """The adapter that is asked for."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def record(self) -> LoraConfig:
        """As the backend takes it; a seed outside 64 bits is folded into them."""
        return LoraConfig(
            rank=self.rank,
            seed=None if self.seed is None else self.seed % 2**63,
            train_attn=self.train_attn,
            train_mlp=self.train_mlp,
            train_unembed=self.train_unembed,
        )


class OptimizerBody(Body):
    """Which optimizer a model gets; AdamW is the only one."""

    type: str = "adamw"


class CreateModel(OfSession):
    """A fresh adapter on the base model."""

    model_seq_id: SeqId
    base_model: str
    lora_config: LoraBody = LoraBody(rank=32)
    optimizer_config: OptimizerBody = OptimizerBody()
    user_metadata: Tags | None = None


class LoadWeights(Body):
    """Loads a checkpoint: into `model_id`, or into a new model numbered within its session."""

    path: str
    optimizer: bool = False
    model_id: str | None = None
    seq_id: SeqId | None = None
    session_id: str | None = None
    model_seq_id: SeqId | None = None
    base_model: str | None = None
    optimizer_config: OptimizerBody | None = None
    user_metadata: Tags | None = None


class SaveWeights(Numbered):
    """Keeps weights and optimizer under a name."""

    path: str | None = None
    ttl_seconds: TtlSeconds | None = None
    overwrite: bool = False
    user_metadata: Tags | None = None


class SaveWeightsForSampler(Numbered):
    """Keeps weights for sampling, under a name or for one sampling session."""

    path: str | None = None
    sampling_session_seq_id: SeqId | None = None
    kind: str = "snapshot"
    ttl_seconds: TtlSeconds | None = None
    user_metadata: Tags | None = None


class AdamBody(Body):
    """One step's settings; see `records.AdamParams`."""

    learning_rate: float = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(ge=0)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0)] = 0.0

    def record(self) -> AdamParams:
        """As the backend takes it."""
        return AdamParams(**dict(self))


class OptimStep(Numbered):
    """One optimizer step. `optimizer_params` is how the SDK sends any optimizer but AdamW."""

    adam_params: AdamBody | None = None
    optimizer_params: OptimizerBody | None = None


class CreateSamplingSession(OfSession):
    """Sampling from a checkpoint, or from the base model."""

    sampling_session_seq_id: SeqId
    base_model: str | None = None
    model_path: str | None = None


class RetrieveFuture(Body):
    """Asks for a request's answer."""

    request_id: str


class TinkerPath(Body):
    """Names a checkpoint."""

    tinker_path: str


class ChunkBody(Body):
    """A piece of a prompt; text only."""

    type: str = "encoded_text"
    tokens: list[int] = []


class PromptBody(Body):
    """A prompt, chunk by chunk."""

    chunks: list[ChunkBody]

    def tokens(self) -> IntArray:
        """All tokens, [P]. Raises BadBody for anything but text."""
        for index, chunk in enumerate(self.chunks):
            if chunk.type != "encoded_text":
                raise BadBody(f"prompt.chunks[{index}]: {_only_text(chunk.type[:80])}")
        try:
            parts = [np.array(chunk.tokens, np.int64) for chunk in self.chunks]
        except OverflowError:
            raise BadBody("prompt: a token id does not fit in 64 bits") from None
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


class SamplingParamsBody(Body):
    """How to draw; ranges are the backend's to check."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    def record(self, most_tokens: int) -> SamplingParams:
        """As the backend takes it; `max_tokens` None fills the context up. Raises BadBody."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        strings = tuple(stop for stop in stops or () if isinstance(stop, str))
        tokens = tuple(stop for stop in stops or () if isinstance(stop, int))
        for token in tokens:
            if not 0 <= token <= MOST:
                problem = f"sampling_params.stop: {str(token)[:80]} is no token id"
                raise BadBody(f"{problem}; encode stops with this model's tokenizer")
        return SamplingParams(
            max_tokens=most_tokens if self.max_tokens is None else min(self.max_tokens, MOST),
            temperature=self.temperature,
            top_k=min(self.top_k, MOST),
            top_p=self.top_p,
            seed=None if self.seed is None else self.seed % 2**63,
            stop_strings=strings or None,
            stop_tokens=() if stops == [] else tokens or None,
        )


class TargetsBody(Body):
    """Token ids whose logprobs are wanted: [P - 1, K], dense or CSR; -1 and unlisted cells: none.

    The answer has the same layout. What is listed is packed into as few columns as it needs.
    """

    data: list[int]
    dtype: Literal["int64"] = "int64"
    shape: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=2, max_length=2)]
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None

    def tokens(self) -> IntArray:
        """The ids, [P - 1, most in a row]. Raises BadBody."""
        where = "target_prompt_logprobs"
        try:
            ids = np.array(self.data, np.int64)
            if self.sparse_crow_indices is None:
                if math.prod(self.shape) != ids.size:
                    raise BadBody(f"{where}: holds {ids.size} ids, not its shape {self.shape}")
                return ids.reshape(self.shape)
            ends = np.array(self.sparse_crow_indices, np.int64)
            columns = np.array(self.sparse_col_indices or [], np.int64)
        except OverflowError:
            raise BadBody(f"{where}: a number does not fit in 64 bits") from None
        _check_csr(ends, columns, ids.size, (self.shape[0], self.shape[1]), where)
        widths = np.diff(ends)
        if self.shape[0] * widths.max(initial=0) > MAX_CELLS:
            raise BadBody(f"{where}: names over {MAX_CELLS} cells; ask for fewer")
        packed = np.full((self.shape[0], widths.max(initial=0)), -1, np.int64)
        packed[self._listed(packed.shape[1])] = ids
        return packed

    def _listed(self, columns: int) -> npt.NDArray[np.bool_]:
        """Where in the packed ids something was listed."""
        widths = np.diff(np.array(self.sparse_crow_indices, np.int64))
        listed: npt.NDArray[np.bool_] = np.arange(columns) < widths[:, None]
        return listed

    def put(self, logprobs: FloatArray, tensor: pb.Tensor) -> None:
        """Write the logprobs of `tokens` in this layout."""
        tensor.dtype = pb.DTYPE_FLOAT32
        tensor.shape.extend(self.shape)
        if self.sparse_crow_indices is None:
            tensor.dense = logprobs.astype(np.float32).tobytes()
            return
        listed = logprobs[self._listed(logprobs.shape[1])]
        tensor.sparse_csr.values = listed.astype(np.float32).tobytes()
        tensor.sparse_csr.crow_indices = np.array(self.sparse_crow_indices, np.int64).tobytes()
        columns = np.array(self.sparse_col_indices or [], np.int64)
        tensor.sparse_csr.col_indices = columns.tobytes()


class Sample(Body):
    """Draws from a sampling session's weights."""

    sampling_session_id: str | None = None
    seq_id: SeqId | None = None
    num_samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    prompt: PromptBody
    sampling_params: SamplingParamsBody
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    topk_sample_logprobs: Annotated[int, Field(ge=0)] = 0
    target_prompt_logprobs: TargetsBody | None = None
    prompt_alt_tokens_k: Annotated[int, Field(ge=0)] = 0

    def record(self, request_id: str, sampler_id: str | None, context: int) -> SampleRequest:
        """As the backend takes it. Raises BadBody."""
        prompt, last_n = self.prompt.tokens(), self.prompt_logprobs_last_n
        if last_n is not None and not (self.prompt_logprobs and last_n < prompt.size):
            raise BadBody(
                f"prompt_logprobs_last_n: is {last_n} for a prompt of {prompt.size} tokens; give "
                "at most one less than it has, and set prompt_logprobs"
            )
        return SampleRequest(
            request_id=request_id,
            sampler_id=sampler_id,
            prompt=prompt,
            num_samples=self.num_samples,
            params=self.sampling_params.record(max(1, context - prompt.size)),
            prompt_logprobs=bool(self.prompt_logprobs),
            topk_prompt_logprobs=self.topk_prompt_logprobs,
            topk_sample_logprobs=self.topk_sample_logprobs,
            target_prompt_tokens=self.target_prompt_logprobs.tokens()
            if self.target_prompt_logprobs is not None
            else None,
            prompt_alt_tokens_k=self.prompt_alt_tokens_k,
        )


class FinishReason(Body):
    """How a client's work went."""

    type: Literal["success", "errored", "interrupted"]


class FinishSession(Body):
    """Ends a session."""

    reason: FinishReason
    detail: str | None = None


class SaveWeightsExternal(Numbered):
    """Keeps an adapter under a name, to be downloaded."""

    path: str
    ttl_seconds: TtlSeconds | None = None
    age_encryption_recipients: list[str] | None = None


class CopyWeights(Body):
    """Copies a checkpoint: to a number of a session, or to wherever the server likes."""

    source_path: str
    session_id: str | None = None
    model_seq_id: SeqId | None = None
    destination_project_id: str | None = None
    ttl_seconds: TtlSeconds | None = None


class SetTtl(Body):
    """When a checkpoint expires, from now on; None: never."""

    ttl_seconds: TtlSeconds | None


class SearchOwner(Body):
    """Whose sessions are searched. All that this server has are its owner's."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[str] = []


class SearchStatus(Body):
    """One of the states that sessions are searched for."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[str] | None = None


class SearchCursor(Body):
    """The last session of the page before."""

    last_created_at: AwareDatetime
    last_session_id: str


class SearchSessions(Body):
    """Asks for a page of sessions, the newest first."""

    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = {}
    display_name: Annotated[str, Field(min_length=1)] | None = None
    owner: SearchOwner = SearchOwner()
    statuses: list[SearchStatus] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: SearchCursor | None = None


def read_json(kind: type[B], body: bytes) -> B:
    """The request in a JSON body. Raises BadBody that says which fields are wrong, and how."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        numbered = {"model_id", "seq_id"} <= kind.model_fields.keys()
        raise BadBody(_explain(error), *(_ids(body) if numbered else ())) from None


def _ids(body: bytes) -> tuple[str | None, int | None]:
    """Model and number of a body that is at least a JSON object, so that its turn is used up."""
    try:
        document = from_json(body)
    except ValueError:
        return None, None
    if not isinstance(document, dict):
        return None, None
    model_id, seq_id = document.get("model_id"), document.get("seq_id")
    numbered = type(seq_id) is int and 0 <= seq_id < MAX_SEQ_ID
    return model_id if isinstance(model_id, str) else None, seq_id if numbered else None


def _explain(error: ValidationError) -> str:
    problems = []
    for problem in error.errors(include_url=False, include_context=False)[:5]:
        where = ".".join(str(part)[:80] for part in problem["loc"]) or "body"
        given = problem.get("input")
        shown = f" (is {repr(given)[:80]})" if isinstance(given, str | int | float | None) else ""
        problems.append(f"{where}: {problem['msg']}{shown}")
    return "; ".join(problems)


# -- forward_backward --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PassBody:
    """A forward_backward request; with `problem` set, its data could not be read."""

    model_id: str
    seq_id: int | None
    loss_fn: str
    loss_config: Mapping[str, float | str]
    forward_only: bool
    data: tuple[Datum, ...]
    problem: str | None = None


def read_pass(body: bytes, encoding: str) -> PassBody:
    """The request in a protobuf body, plain or zstd. Raises BadBody if it is neither."""
    encoding = encoding.strip().lower()
    if encoding == "zstd":
        body = _unfold(body)
    elif encoding not in ("", "identity"):
        raise BadBody(f"Content-Encoding: {encoding[:80]} is not known; send zstd or none")
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise BadBody(f"body: is no ForwardBackwardRequest protobuf ({error})") from None
    problem: str | None = None
    data: tuple[Datum, ...] = ()
    numbered = message.seq_id >= 0
    try:
        if not numbered:
            raise BadBody(f"seq_id: is {message.seq_id}; a model's first operation is number 1")
        data = _read_data(message.data)
    except BadBody as error:
        problem = str(error)
    return PassBody(
        model_id=message.model_id,
        seq_id=(message.seq_id or None) if numbered else None,
        loss_fn=message.loss_fn,
        loss_config=_read_config(message),
        forward_only=message.forward_only,
        data=data,
        problem=problem,
    )


def _unfold(body: bytes) -> bytes:
    """The one zstd frame that is the body, whole: a part might pass for a smaller batch.

    It is unfolded bit by bit, as a kilobyte may hold 32 MB of the same.
    """
    frame = zstandard.ZstdDecompressor().decompressobj()
    parts, size, read = [], 0, 0
    try:
        while read < len(body) and not frame.eof:
            parts.append(frame.decompress(body[read : read + 1024]))
            read += 1024
            size += len(parts[-1])
            if size > MAX_BODY_BYTES:
                problem = f"body: unfolds to over {MAX_BODY_BYTES} bytes; send smaller batches"
                raise BadBody(problem)
    except zstandard.ZstdError as error:
        raise BadBody(f"body: is not zstd ({error})") from None
    if not frame.eof or frame.unused_data or read < len(body):
        raise BadBody("body: is not one whole zstd frame; was it cut, or two joined?")
    return b"".join(parts)


def _read_config(message: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    """The loss's settings; the second map supersedes the first, which is floats only."""
    if message.loss_fn_config_v2:
        return {
            key: value.text if value.WhichOneof("value") == "text" else value.number
            for key, value in message.loss_fn_config_v2.items()
        }
    return dict(message.loss_fn_config)


def _read_data(messages: Iterable[pb.Datum]) -> tuple[Datum, ...]:
    data = []
    room, parts = MAX_CELLS, 0
    for index, message in enumerate(messages):
        where = f"data[{index}]"
        parts += 1 + len(message.model_input) + len(message.loss_fn_inputs)
        if parts > MAX_PARTS:
            problem = f"the batch has over {MAX_PARTS} datums, chunks and inputs"
            raise BadBody(f"{where}: {problem}; send smaller batches")
        inputs: dict[str, Array] = {}
        for name, tensor in message.loss_fn_inputs.items():
            inputs[name] = _read_tensor(tensor, f"{where}.loss_fn_inputs.{name[:80]}", room)
            room -= inputs[name].size
        data.append(Datum(_read_tokens(message.model_input, f"{where}.model_input"), inputs))
    return tuple(data)


def _read_tokens(chunks: Iterable[pb.Chunk], where: str) -> IntArray:
    parts = []
    for index, chunk in enumerate(chunks):
        if chunk.WhichOneof("chunk") != "encoded_text":
            kind = chunk.WhichOneof("chunk") or "empty"
            raise BadBody(f"{where}.chunks[{index}]: {_only_text(kind)}")
        parts.append(_numbers(chunk.encoded_text.tokens, np.dtype(np.int32), f"{where}.tokens"))
    tokens = parts[0] if len(parts) == 1 else np.concatenate(parts or [np.zeros(0, np.int32)])
    return tokens.astype(np.int64)


_DTYPES: Final[Mapping[int, np.dtype[Any]]] = {
    pb.DTYPE_FLOAT32: np.dtype(np.float32),
    pb.DTYPE_INT64: np.dtype(np.int64),
    pb.DTYPE_INT32: np.dtype(np.int32),
    pb.DTYPE_BFLOAT16: np.dtype(np.uint16),
}


def _read_tensor(message: pb.Tensor, where: str, room: int) -> Array:
    """A tensor of at most `room` cells, dense; nothing larger is ever laid out."""
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise BadBody(f"{where}: dtype {message.dtype} is not known; send float32 or int64")
    sparse = message.HasField("sparse_csr")
    values = _numbers(message.sparse_csr.values if sparse else message.dense, dtype, where)
    if message.dtype == pb.DTYPE_BFLOAT16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    elif message.dtype == pb.DTYPE_INT32:
        values = values.astype(np.int64)
    shape = tuple(message.shape) or (() if sparse else values.shape)
    if not 1 + sparse <= len(shape) <= 2 or min(shape) < 0:
        dims = "[N, K]" if sparse else "[N] or [N, K]"
        raise BadBody(f"{where}: has the shape {list(shape[:8])}; send {dims}")
    if max(shape) > room or math.prod(shape) > room:
        raise BadBody(f"{where}: the batch has over {MAX_CELLS} numbers; send smaller batches")
    if sparse:
        return _densify(values, message.sparse_csr, (shape[0], shape[1]), where)
    if math.prod(shape) != values.size:
        raise BadBody(f"{where}: holds {values.size} values, which is not its shape {list(shape)}")
    return values.reshape(shape)


def _densify(values: Array, csr: pb.SparseCsr, shape: tuple[int, int], where: str) -> Array:
    """A CSR matrix with its empty cells 0, as the SDK's own `to_dense` gives it."""
    ends = _numbers(csr.crow_indices, np.dtype(np.int64), f"{where}.crow_indices")
    columns = _numbers(csr.col_indices, np.dtype(np.int64), f"{where}.col_indices")
    _check_csr(ends, columns, values.size, shape, where)
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(ends)), columns] = values
    return dense


def _check_csr(
    ends: IntArray, columns: IntArray, values: int, shape: tuple[int, int], where: str
) -> None:
    sound = (
        ends.size == shape[0] + 1
        and ends[0] == 0
        and ends[-1] == columns.size == values
        and bool((ends[1:] >= ends[:-1]).all())
        and (columns.size == 0 or (int(columns.min()) >= 0 and int(columns.max()) < shape[1]))
    )
    if not sound:
        raise BadBody(f"{where}: its CSR indices do not describe a matrix of shape {list(shape)}")


def _numbers(raw: bytes, dtype: np.dtype[Any], where: str) -> npt.NDArray[Any]:
    if len(raw) % dtype.itemsize:
        raise BadBody(f"{where}: {len(raw)} bytes are no whole number of {dtype} values")
    return np.frombuffer(raw, dtype)


def _only_text(kind: str) -> str:
    return f"this engine takes tokens only, not {kind} chunks"


# -- results -----------------------------------------------------------------------------------


def pass_result(output: PassOutput) -> bytes:
    """ForwardBackwardOutput: neighbours of one trailing shape share a batched tensor."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for key, value in output.metrics.items():
        message.metrics[key] = value
    for layout, group in groupby(output.outputs, _layout):
        rows = list(group)
        record = message.loss_fn_outputs.add(num_datums=len(rows))
        for name, trailing in layout:
            parts = [np.ascontiguousarray(row[name], np.float32) for row in rows]
            offsets = np.cumsum([0, *(part.nbytes for part in parts)], dtype=np.int64)
            tensor = record.fields[name]
            tensor.data = b"".join(part.tobytes() for part in parts)
            tensor.offsets = offsets.tobytes()
            tensor.dtype = pb.DTYPE_FLOAT32
            tensor.trailing_shape.extend(trailing)
    return message.SerializeToString()


def _layout(row: Mapping[str, Array]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, array.shape[1:]) for name, array in row.items())


def sample_result(
    output: SampleOutput, last_n: int | None = None, targets: TargetsBody | None = None
) -> bytes:
    """SampleResponse; with `last_n` only the prompt's last positions carry logprobs."""
    message = pb.SampleResponse()
    for sequence in output.sequences:
        added = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP
            if sequence.stop_reason == "stop"
            else pb.STOP_REASON_LENGTH,
            tokens=sequence.tokens.astype(np.int32).tobytes(),
            logprobs=sequence.logprobs.astype(np.float32).tobytes(),
        )
        if sequence.topk_tokens is not None and sequence.topk_logprobs is not None:
            _put_top(added.topk_sampled_logprobs, sequence.topk_tokens, sequence.topk_logprobs)
    if output.prompt_logprobs is not None:
        logprobs = output.prompt_logprobs.astype(np.float32)
        logprobs[: _masked(logprobs.size, last_n)] = np.nan
        message.prompt_logprobs = logprobs.tobytes()
    if output.topk_prompt_tokens is not None and output.topk_prompt_logprobs is not None:
        values = output.topk_prompt_logprobs.copy()
        values[: _masked(len(values), last_n)] = np.nan
        _put_top(message.topk_prompt_logprobs, output.topk_prompt_tokens, values)
    if output.target_prompt_logprobs is not None and targets is not None:
        targets.put(output.target_prompt_logprobs, message.target_prompt_logprobs)
    if output.prompt_alt_tokens is not None and output.prompt_alt_logprobs is not None:
        alternatives = message.prompt_alt_tokens
        for tensor, dtype, array in (
            (alternatives.tokens, pb.DTYPE_INT32, output.prompt_alt_tokens.astype(np.int32)),
            (alternatives.logprobs, pb.DTYPE_FLOAT32, output.prompt_alt_logprobs),
        ):
            tensor.dtype, tensor.dense = dtype, array.tobytes()
            tensor.shape.extend(array.shape)
    return message.SerializeToString()


def _put_top(top: pb.TopkLogprobs, tokens: IntArray, logprobs: FloatArray) -> None:
    """Ids and logprobs [positions, k]; cells whose logprob is NaN hold nothing."""
    nothing = np.isnan(logprobs)
    top.length, top.k = tokens.shape
    top.token_ids = np.where(nothing, 0, tokens).astype(np.int32).tobytes()
    top.logprobs = np.where(nothing, _NO_LOGPROB, logprobs).astype(np.float32).tobytes()


def _masked(length: int, last_n: int | None) -> int:
    """How many leading positions are left out."""
    return 0 if last_n is None else max(0, length - last_n)
