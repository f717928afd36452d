"""The protocol's bodies against the SDK's own encoders and decoders."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_proto_response

from backends.engine import wire
from backends.engine.records import PassOutput, SampledSequence, SampleOutput


def request(*data: types.Datum, **config: float | str) -> pb.ForwardBackwardRequest:
    """What the SDK sends for these datums."""
    return forward_backward_request_to_proto(
        types.ForwardBackwardRequest(
            forward_backward_input=types.ForwardBackwardInput(
                data=list(data), loss_fn="cross_entropy", loss_fn_config=config or None
            ),
            model_id="m",
            seq_id=7,
        )
    )


def datum(tokens: list[int], **inputs: Any) -> types.Datum:
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def read(message: pb.ForwardBackwardRequest) -> wire.PassBody:
    return wire.read_pass(message.SerializeToString(), "")


def test_reads_what_the_sdk_sends() -> None:
    message = request(
        datum([3, 1, 2], target_tokens=np.array([1, 2, 9]), weights=np.float32([0, -1.5, 1e-9])),
        datum([5], target_tokens=np.array([6])),
    )
    body = read(message)
    assert (body.model_id, body.seq_id, body.loss_fn, body.problem) == (
        "m",
        7,
        "cross_entropy",
        None,
    )
    first, second = body.data
    assert first.tokens.tolist() == [3, 1, 2]
    assert first.tokens.dtype == np.int64
    assert first.loss_inputs["target_tokens"].tolist() == [1, 2, 9]
    assert first.loss_inputs["weights"].tobytes() == np.float32([0, -1.5, 1e-9]).tobytes()
    assert set(second.loss_inputs) == {"target_tokens"}
    packed = zstandard.ZstdCompressor().compress(message.SerializeToString())
    again = wire.read_pass(packed, "zstd")
    assert [d.tokens.tolist() for d in again.data] == [[3, 1, 2], [5]]


def test_joins_the_chunks_of_an_input() -> None:
    message = request(datum([1], target_tokens=np.array([1])))
    more = message.data[0].model_input.add()
    more.encoded_text.tokens = np.array([8, 9], np.int32).tobytes()
    assert read(message).data[0].tokens.tolist() == [1, 8, 9]


def test_sparse_tensors_become_what_the_sdk_itself_makes_of_them() -> None:
    targets = torch.zeros(6, 40, dtype=torch.int64)
    weights = torch.zeros(6, 40)
    targets[0, 3], targets[4, 39], weights[0, 3], weights[4, 39] = 11, 7, 0.25, -2.0
    message = request(datum([1] * 6, target_tokens=targets, weights=weights))
    assert message.data[0].loss_fn_inputs["weights"].HasField("sparse_csr")
    inputs = read(message).data[0].loss_inputs
    np.testing.assert_array_equal(inputs["target_tokens"], targets.numpy())
    np.testing.assert_array_equal(inputs["weights"], weights.numpy())


def test_reads_narrow_types() -> None:
    message = request(datum([1, 2], target_tokens=np.array([1, 2])))
    tensor = message.data[0].loss_fn_inputs["weights"]
    tensor.dtype = pb.DTYPE_BFLOAT16
    tensor.dense = (np.float32([1.5, -0.5]).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    ids = message.data[0].loss_fn_inputs["target_tokens"]
    ids.dtype, ids.dense = pb.DTYPE_INT32, np.array([4, 5], np.int32).tobytes()
    inputs = read(message).data[0].loss_inputs
    assert inputs["weights"].tolist() == [1.5, -0.5]
    assert inputs["target_tokens"].tolist() == [4, 5]
    assert inputs["target_tokens"].dtype == np.int64


def test_the_second_config_map_supersedes_the_first() -> None:
    message = request(datum([1]), clip_low_threshold=0.5, mode="soft")
    message.loss_fn_config["clip_low_threshold"] = 0.9
    assert read(message).loss_config == {"clip_low_threshold": 0.5, "mode": "soft"}
    message.loss_fn_config_v2.clear()
    assert read(message).loss_config == {"clip_low_threshold": 0.9}


def _odd_bytes(message: pb.ForwardBackwardRequest) -> None:
    message.data[1].model_input[0].encoded_text.tokens = b"abc"


def _wrong_shape(message: pb.ForwardBackwardRequest) -> None:
    message.data[1].loss_fn_inputs["target_tokens"].shape[:] = [5]


def _shape(*sides: int) -> Any:
    def spoil(message: pb.ForwardBackwardRequest) -> None:
        message.data[1].loss_fn_inputs["target_tokens"].shape[:] = sides

    return spoil


def _image(message: pb.ForwardBackwardRequest) -> None:
    message.data[1].model_input[0].image.data = b"png"


def _no_dtype(message: pb.ForwardBackwardRequest) -> None:
    message.data[1].loss_fn_inputs["target_tokens"].dtype = pb.DTYPE_UNSPECIFIED


def _sparse(crow: list[int], col: list[int], shape: list[int]) -> Any:
    def spoil(message: pb.ForwardBackwardRequest) -> None:
        tensor = message.data[1].loss_fn_inputs["target_tokens"]
        tensor.shape[:] = shape
        tensor.sparse_csr.values = np.ones(len(col), np.int64).tobytes()
        tensor.sparse_csr.crow_indices = np.array(crow, np.int64).tobytes()
        tensor.sparse_csr.col_indices = np.array(col, np.int64).tobytes()

    return spoil


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_odd_bytes, r"data\[1\].model_input.tokens: 3 bytes"),
        (_wrong_shape, r"data\[1\].loss_fn_inputs.target_tokens: holds 2 values.*\[5\]"),
        (_shape(-1, -2), r"data\[1\].*has the shape \[-1, -2\]; send \[N\] or \[N, K\]"),
        (_shape(*[1] * 70), r"has the shape \[1, 1, 1, 1, 1, 1, 1, 1\]; send"),
        (_shape(0, 2**62), r"the batch has over \d+ numbers"),
        (_shape(2**32, 2**32), r"the batch has over \d+ numbers"),
        (_image, r"data\[1\].model_input.chunks\[0\]: this engine takes tokens only, not image"),
        (_no_dtype, r"dtype 0 is not known"),
        (_sparse([0, 1, 2], [0, 9], [2, 4]), r"CSR indices do not describe .*\[2, 4\]"),
        (_sparse([0, 2, 1], [0, 1], [2, 4]), r"CSR indices"),
        (_sparse([0, 1], [0], [2, 4]), r"CSR indices"),
        (_sparse([-1, 1, 2], [0, 1], [2, 4]), r"CSR indices"),
        (_sparse([0, 2**63 - 1, -(2**63), -1, 1], [0], [4, 4]), r"CSR indices"),
        (_sparse([], [], [2, 4]), r"CSR indices"),
        (_sparse([0, 0, 0], [], [2**31, 2**31]), r"the batch has over \d+ numbers"),
        (_sparse([0, 0], [], [4]), r"has the shape \[4\]; send \[N, K\]"),
    ],
)
def test_data_that_cannot_be_read_is_named_and_keeps_its_number(spoil: Any, said: str) -> None:
    message = request(*[datum([1, 2], target_tokens=np.array([1, 2])) for _ in range(2)])
    spoil(message)
    body = read(message)
    assert (body.model_id, body.seq_id, body.data) == ("m", 7, ())
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(body.problem)


@pytest.mark.parametrize(
    ("body", "encoding", "said"),
    [
        (b"\xff\xff", "", "no ForwardBackwardRequest"),
        (b"plain", "zstd", "is not zstd"),
        (b"", "gzip", "gzip is not known"),
    ],
)
def test_bodies_that_are_something_else(body: bytes, encoding: str, said: str) -> None:
    with pytest.raises(wire.BadBody, match=said):
        wire.read_pass(body, encoding)


def test_a_negative_number_is_no_number() -> None:
    message = request(datum([1]))
    message.seq_id = -7
    body = read(message)
    assert (body.seq_id, body.problem) == (
        None,
        "seq_id: is -7; a model's first operation is number 1",
    )


@pytest.mark.parametrize("with_size", [True, False])
def test_a_small_body_cannot_unfold_without_end(
    monkeypatch: pytest.MonkeyPatch, with_size: bool
) -> None:
    monkeypatch.setattr(wire, "MAX_BODY_BYTES", 1000)
    bomb = zstandard.ZstdCompressor(write_content_size=with_size).compress(b"\0" * 10**6)
    assert len(bomb) < 1000
    with pytest.raises(wire.BadBody, match="unfolds to over 1000 bytes"):
        wire.read_pass(bomb, "zstd")


@pytest.mark.parametrize("with_size", [True, False])
def test_a_cut_body_is_not_taken_for_a_smaller_batch(with_size: bool) -> None:
    """zstd gives out whole blocks of a cut frame, and a cut protobuf may be a good one."""
    whole = request(*[datum([1, 2, 3], target_tokens=np.array([1, 2, 3]))] * 9999)
    packed = zstandard.ZstdCompressor(write_content_size=with_size).compress(
        whole.SerializeToString()
    )
    assert len(wire.read_pass(packed, "ZSTD").data) == 9999
    for spoilt in (packed[:-1], packed[: len(packed) // 2], packed[:10], packed * 2, packed + b"x"):
        with pytest.raises(wire.BadBody, match="is not one whole zstd frame"):
            wire.read_pass(spoilt, "zstd")


def test_tensors_are_counted_before_they_are_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes of indices may stand for gigabytes, and one datum can hold many tensors."""
    targets = torch.zeros(4, 100, dtype=torch.int64)
    targets[0, 0] = 1
    message = request(datum([1] * 4, target_tokens=targets, weights=targets.float()))
    monkeypatch.setattr(wire, "MAX_CELLS", 800)
    assert read(message).problem is None
    monkeypatch.setattr(wire, "MAX_CELLS", 799)
    assert "the batch has over 799 numbers; send smaller batches" in (read(message).problem or "")


def test_there_is_a_most_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    message = request(*[datum([1], target_tokens=np.array([1]))] * 3)
    monkeypatch.setattr(wire, "MAX_PARTS", 9)
    assert read(message).problem is None
    monkeypatch.setattr(wire, "MAX_PARTS", 8)
    assert "data[2]: the batch has over 8 datums, chunks" in (read(message).problem or "")
    message.data[0].model_input.extend([message.data[0].model_input[0]] * 8)
    assert "data[0]: the batch has over 8 datums, chunks" in (read(message).problem or "")


# -- results -----------------------------------------------------------------------------------


def test_pass_results_reach_the_sdk_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    shapes = [(3,), (1,), (4, 2), (2, 2), (2, 5), (6,)]
    rows = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    rows[2] = np.asfortranarray(rows[2])
    output = PassOutput(tuple({"logprobs": row} for row in rows), {"loss:sum": 1.25})
    told: Any = deserialize_proto_response(wire.pass_result(output), types.ForwardBackwardOutput)
    assert told.metrics == {"loss:sum": 1.25}
    assert len(told.loss_fn_outputs) == len(rows)
    for row, fields in zip(rows, told.loss_fn_outputs, strict=True):
        assert fields["logprobs"].shape == list(row.shape)
        np.testing.assert_array_equal(fields["logprobs"].to_numpy(), row)


def sample_output() -> SampleOutput:
    return SampleOutput(
        sequences=(
            SampledSequence(np.array([4, 5]), np.float32([-0.5, -1]), "stop"),
            SampledSequence(np.array([6]), np.float32([-2]), "length"),
        ),
        prompt_logprobs=np.float32([np.nan, -1, -2]),
        topk_prompt_tokens=np.array([[0, 0], [7, 8], [9, 3]]),
        topk_prompt_logprobs=np.float32([[np.nan, np.nan], [-1, -2], [-3, -4]]),
    )


def test_sample_results_reach_the_sdk() -> None:
    told: Any = deserialize_proto_response(
        wire.sample_result(sample_output()), types.SampleResponse
    )
    assert [sequence.tokens for sequence in told.sequences] == [[4, 5], [6]]
    assert [sequence.logprobs for sequence in told.sequences] == [[-0.5, -1], [-2]]
    assert [sequence.stop_reason for sequence in told.sequences] == ["stop", "length"]
    assert told.prompt_logprobs == [None, -1, -2]
    assert told.topk_prompt_logprobs == [None, [(7, -1), (8, -2)], [(9, -3), (3, -4)]]


def test_only_the_last_prompt_positions_where_asked() -> None:
    body = wire.sample_result(sample_output(), last_n=1)
    told: Any = deserialize_proto_response(body, types.SampleResponse)
    assert told.prompt_logprobs == [None, None, -2]
    assert told.topk_prompt_logprobs == [None, None, [(9, -3), (3, -4)]]


# -- JSON --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        (wire.OptimStep, b"{", "body: Invalid JSON"),
        (wire.OptimStep, b"[]", "body: Input should be an object"),
        (wire.OptimStep, b'{"seq_id": 1}', "model_id: Field required"),
        (wire.OptimStep, b'{"model_id": "m", "seq_id": -1}', "seq_id: .*greater than"),
        (
            wire.OptimStep,
            b'{"model_id": "m", "adam_params": {"learning_rate": NaN}}',
            "adam_params.learning_rate: .*finite",
        ),
        (
            wire.OptimStep,
            b'{"model_id": "m", "adam_params": {"beta1": 1.0}}',
            r"adam_params.beta1: .*less than 1 \(is 1.0\)",
        ),
        (wire.SaveWeights, b'{"model_id": "m", "ttl_seconds": 60}', "ttl_seconds: .*3600"),
        (wire.SaveWeights, b'{"model_id": "m", "ttl_seconds": 9e9}', "ttl_seconds: .*integer"),
        (
            wire.OptimStep,
            b'{"model_id": "m", "adam_params": {"eps": "1e-8"}}',
            r"adam_params.eps: .*number \(is '1e-8'\)",
        ),
        (wire.SaveWeights, b'{"model_id": "m", "overwrite": "yes"}', "overwrite: .*boolean"),
        (
            wire.Sample,
            b'{"prompt": {"chunks": []}, "sampling_params": {"temperature": Infinity}}',
            "temperature: .*finite",
        ),
    ],
)
def test_json_mistakes_name_field_and_value(kind: type[wire.Body], body: bytes, said: str) -> None:
    with pytest.raises(wire.BadBody, match=said):
        wire.read_json(kind, body)


@pytest.mark.parametrize("seconds", [3600, 10 * 365 * 86400, None])
def test_a_ttl_is_between_an_hour_and_ten_years(seconds: int | None) -> None:
    body = {"model_id": "m", "ttl_seconds": seconds}
    read_back = wire.read_json(wire.SaveWeights, json.dumps(body).encode())
    assert read_back.ttl_seconds == seconds
    for wrong in (3599, 10 * 365 * 86400 + 1, -1, 0):
        with pytest.raises(wire.BadBody, match="ttl_seconds"):
            wire.read_json(wire.SaveWeights, json.dumps(body | {"ttl_seconds": wrong}).encode())


def test_metadata_is_text() -> None:
    """The SDK sends any JSON with a model or session, but takes texts only in what is listed."""
    given = b'{"user_metadata": {"run": "a", "step": 5, "lr": NaN, "tags": ["x", null]}}'
    assert wire.read_json(wire.CreateSession, given).user_metadata == {
        "run": "a",
        "step": "5",
        "lr": "NaN",
        "tags": '["x", null]',
    }


def test_an_error_shows_little_of_a_long_value() -> None:
    with pytest.raises(wire.BadBody) as caught:
        wire.read_json(wire.OptimStep, json.dumps({"model_id": 10**4000, "x": "y"}).encode())
    assert len(str(caught.value)) < 300


def test_json_mistakes_keep_model_and_number() -> None:
    with pytest.raises(wire.BadBody) as caught:
        wire.read_json(wire.OptimStep, b'{"model_id":"m","seq_id":4,"adam_params":{"eps":-1}}')
    assert (caught.value.model_id, caught.value.seq_id) == ("m", 4)
    with pytest.raises(wire.BadBody) as caught:
        wire.read_json(wire.Sample, b'{"model_id":"m","seq_id":4}')
    assert (caught.value.model_id, caught.value.seq_id) == (None, None)


def sample_body(**fields: Any) -> wire.Sample:
    base: dict[str, Any] = {
        "prompt": {"chunks": [{"tokens": [1, 2]}, {"tokens": [3]}]},
        "sampling_params": {},
    }
    return wire.Sample.model_validate(base | fields)


@pytest.mark.parametrize(
    ("stop", "strings", "tokens"),
    [
        (None, None, None),
        ([], None, ()),
        ("\n", ("\n",), None),
        (["a", "b"], ("a", "b"), None),
        ([5, 6], None, (5, 6)),
        (["a", 5], ("a",), (5,)),
    ],
)
def test_stops(stop: Any, strings: Any, tokens: Any) -> None:
    params = sample_body(sampling_params={"stop": stop, "max_tokens": 4}).sampling_params.record(9)
    assert (params.stop_strings, params.stop_tokens, params.max_tokens) == (strings, tokens, 4)


def test_sample_requests() -> None:
    record = sample_body(num_samples=3, sampling_params={"seed": 2**70 + 5}).record("r", "s", 10)
    assert record.prompt.tolist() == [1, 2, 3]
    assert record.params.max_tokens == 7
    assert record.params.seed == (2**70 + 5) % 2**63
    assert (record.request_id, record.sampler_id, record.num_samples) == ("r", "s", 3)
    huge = sample_body(sampling_params={"top_k": 2**80, "max_tokens": 2**63}).record("r", "s", 10)
    assert (huge.params.top_k, huge.params.max_tokens) == (2**31 - 1, 2**31 - 1)
    for stop in (-1, 2**31, 2**80):
        with pytest.raises(wire.BadBody, match=f"sampling_params.stop: {stop} is no token id"):
            sample_body(sampling_params={"stop": ["a", stop]}).record("r", "s", 10)
    for prompt_logprobs, last_n in ((None, 1), (True, 3)):
        with pytest.raises(wire.BadBody, match=f"prompt_logprobs_last_n: is {last_n} for a prompt"):
            sample_body(prompt_logprobs=prompt_logprobs, prompt_logprobs_last_n=last_n).record(
                "r", "s", 10
            )
    with pytest.raises(wire.BadBody, match="64 bits"):
        sample_body(prompt={"chunks": [{"tokens": [2**80]}]}).record("r", "s", 10)
    with pytest.raises(wire.BadBody, match="tokens only, not image"):
        sample_body(prompt={"chunks": [{"type": "image"}]}).record("r", "s", 10)


SPARSE = ("sparse_crow_indices", "sparse_col_indices")


@pytest.mark.parametrize("sparse", [True, False])
def test_target_tokens_keep_their_layout(sparse: bool) -> None:
    """Through the SDK's own tensors, and back; the sparse ones are packed on the way."""
    ids = torch.full((4, 9), -1, dtype=torch.int64)
    ids[0, 7], ids[2, 1], ids[2, 8] = 5, 6, 0
    sent = (types.TensorData.from_torch_sparse if sparse else types.TensorData.from_torch)(
        ids, **({"pad_value": -1} if sparse else {})
    )
    assert (sent.sparse_crow_indices is not None) == sparse
    fields = {name: getattr(sent, name) for name in ("dtype", "shape")}
    fields |= {name: getattr(sent, name) for name in SPARSE}
    body = wire.TargetsBody.model_validate({"data": list(sent.data)} | fields)
    asked = body.tokens()
    assert asked.shape == ((4, 2) if sparse else (4, 9))
    output = SampleOutput((), target_prompt_logprobs=np.where(asked < 0, 0, asked * 1.5))
    result = wire.sample_result(output, targets=body)
    response: Any = deserialize_proto_response(result, types.SampleResponse)
    assert response.target_prompt_logprobs is not None
    assert response.target_prompt_logprobs.shape == [4, 9]
    expected = torch.where(ids < 0, 0, ids * 1.5)
    assert torch.equal(response.target_prompt_logprobs.to_torch(), expected)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"shape": [2, 2]}, "holds 3 ids, not its shape"),
        ({"shape": [1, 3], "data": [1, 2, 2**80]}, "64 bits"),
        ({"sparse_crow_indices": [0, 3]}, "CSR indices"),
        ({"sparse_crow_indices": [0, 2], "sparse_col_indices": [0, 1, 2]}, "CSR indices"),
        ({"sparse_crow_indices": [0, 3], "sparse_col_indices": [0, 1, 9]}, "CSR indices"),
    ],
)
def test_target_tokens_that_are_no_matrix(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(wire.BadBody, match=said):
        wire.TargetsBody.model_validate({"shape": [1, 3], "data": [1, 2, 3]} | fields).tokens()
