"""Locks: no protobuf body is the server's fault, and none leaves anything that is not finite.

After every pass that is taken comes an optimizer step: what it makes of the weights has to be
finite, and a pass that is refused must not have moved them. Another tenant is not touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pytest
import zstandard
from backend_contract import CONTEXT, VOCAB, write_base_model
from hosted_engine import HostedEngine, a_pass, check, hosted_engine
from hostile import TEXTS, WHOLE, tries
from hypothesis import given
from hypothesis import strategies as st
from tinker.proto import tinker_public_pb2 as pb

from backends.engine import wire
from backends.engine.losses import LOSSES
from backends.engine.torch_backend import TorchBackend, TorchConfig


@pytest.fixture(scope="module")
def hosted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostedEngine]:
    home = tmp_path_factory.mktemp("hostile")
    base = str(write_base_model(home / "base"))
    config = TorchConfig(device="cpu", threads=1)
    with hosted_engine(base, home / "store", lambda: TorchBackend(base, config)) as hosted:
        yield hosted


PER_MODEL: Final = 20
"""Bodies that are sent for one model."""
MODEL: Final = "00000000-0000-0000-0000-000000000000:train:0"
"""Stands for the model's id until a body is sent: every id has its length."""
CELLS: Final = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e19, 1e30, 3e38, -3e38, 40.0, -1000.0)
UNUSABLE: Final = (float("nan"), float("inf"), -float("inf"))

lengths = st.sampled_from((0, 1, 2, 3, 4, 5, 6, CONTEXT, CONTEXT + 1))
tokens = st.one_of(st.integers(0, VOCAB - 1), st.sampled_from((-1, VOCAB, 2**31 - 1, -(2**31))))
floats = st.one_of(st.sampled_from(CELLS), st.sampled_from(CELLS), st.sampled_from(UNUSABLE))
numbers = st.sampled_from([number for number in WHOLE if -(2**63) <= number < 2**63])
junk = st.binary(max_size=40)


@st.composite
def packed(draw: st.DrawFn, count: int, dtype: Any) -> bytes:
    """An array's bytes, of a few values over and over."""
    few = draw(st.lists(floats if dtype is np.float32 else tokens, min_size=1, max_size=4))
    with np.errstate(over="ignore"):
        return np.resize(np.array(few, dtype), count).tobytes()


def _tensor(draw: st.DrawFn, message: Any) -> Any:
    """One of the message's tensors; a new one if it has none."""
    if not message.data:
        message.data.add()
    inputs = draw(st.sampled_from(list(message.data))).loss_fn_inputs
    names = [*inputs, "weights", "logprobs"]
    return inputs[draw(st.sampled_from(names))]


def other_tokens(draw: st.DrawFn, message: Any) -> None:
    chunks = draw(st.sampled_from(list(message.data) or [message.data.add()])).model_input
    chunk = chunks.add() if draw(st.booleans()) or not chunks else chunks[0]
    chunk.encoded_text.tokens = draw(st.one_of(packed(draw(lengths), np.int32), junk))


def not_text(draw: st.DrawFn, message: Any) -> None:
    chunk = (message.data.add() if not message.data else message.data[0]).model_input.add()
    if draw(st.booleans()):
        chunk.image.data = draw(junk)


def other_values(draw: st.DrawFn, message: Any) -> None:
    tensor = _tensor(draw, message)
    dtype = draw(st.sampled_from((np.float32, np.int64)))
    count = int(np.prod(tensor.shape)) if 0 <= np.prod(tensor.shape) < 100 else 4
    tensor.dense = draw(packed(count, dtype))
    tensor.dtype = pb.DTYPE_FLOAT32 if dtype is np.float32 else pb.DTYPE_INT64


def other_bytes(draw: st.DrawFn, message: Any) -> None:
    _tensor(draw, message).dense = draw(junk)


def other_dtype(draw: st.DrawFn, message: Any) -> None:
    _tensor(draw, message).dtype = draw(st.sampled_from((0, 1, 2, 3, 4, 5, -1, 2**31 - 1)))


def other_shape(draw: st.DrawFn, message: Any) -> None:
    sides = st.one_of(st.integers(-1, 6), numbers)
    _tensor(draw, message).shape[:] = draw(
        st.one_of(st.lists(sides, max_size=4), st.just([1] * 70), st.just([0, 2**62]))
    )


def columns(draw: st.DrawFn, message: Any) -> None:
    """[N, K] in one of the inputs, or in all of them."""
    k = draw(st.integers(1, 3))
    for datum in message.data:
        for tensor in datum.loss_fn_inputs.values():
            if not tensor.HasField("sparse_csr") and (draw(st.integers(0, 3)) > 0):
                tensor.dense = tensor.dense * k
                tensor.shape[:] = [*tensor.shape[:1], k]


def sparse(draw: st.DrawFn, message: Any) -> None:
    tensor = _tensor(draw, message)
    indices = st.lists(st.one_of(st.integers(-1, 6), st.integers(0, 3), numbers), max_size=7)
    tensor.shape[:] = draw(st.lists(st.one_of(st.integers(0, 6), numbers), max_size=3))
    ends = draw(st.one_of(indices, indices.map(lambda many: sorted(map(abs, many)))))
    tensor.sparse_csr.crow_indices = _int64(ends)
    tensor.sparse_csr.col_indices = _int64(draw(indices))
    tensor.sparse_csr.values = draw(st.one_of(junk, packed(draw(lengths), np.int64)))


def _int64(values: list[int]) -> bytes:
    return np.array([max(-(2**63), min(value, 2**63 - 1)) for value in values], np.int64).tobytes()


def without_one(draw: st.DrawFn, message: Any) -> None:
    for datum in message.data[:1]:
        names = sorted(datum.loss_fn_inputs)
        if names:
            del datum.loss_fn_inputs[draw(st.sampled_from(names))]


def other_data(draw: st.DrawFn, message: Any) -> None:
    if draw(st.booleans()):
        del message.data[draw(st.integers(0, 1)) :]
    else:
        message.data.extend(list(message.data))


def other_loss(draw: st.DrawFn, message: Any) -> None:
    message.loss_fn = draw(st.sampled_from((*LOSSES, *_unicode, "CROSS_ENTROPY")))


def other_config(draw: st.DrawFn, message: Any) -> None:
    options = [option.name for loss in LOSSES.values() for option in loss.options]
    key = draw(st.sampled_from((*options, *_unicode)))
    way = draw(st.integers(0, 2))
    if way == 0:
        message.loss_fn_config[key] = draw(st.one_of(floats, st.floats(width=32)))
    elif way == 1:
        message.loss_fn_config_v2[key].number = draw(st.one_of(floats, st.floats()))
    else:
        message.loss_fn_config_v2[key].text = draw(st.sampled_from(_unicode))


def other_names(draw: st.DrawFn, message: Any) -> None:
    if draw(st.integers(0, 3)) == 0:
        message.model_id = draw(st.sampled_from(_unicode))
    else:
        message.seq_id = draw(st.sampled_from((-1, 0, 1, 5, 2**31 - 1, -(2**31))))


def forward(draw: st.DrawFn, message: Any) -> None:
    message.forward_only = True


_unicode = [text for text in TEXTS if text.isprintable() or text == "\x00"]
_VALUES = (other_values, other_values, columns, other_tokens)
_FORMS = (other_bytes, other_dtype, other_shape, sparse, not_text, without_one)
_REST = (other_data, other_loss, other_config, other_config, other_names, forward)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[bytes, dict[str, str]]:
    """A good pass, changed here and there, and perhaps damaged on its way."""
    loss_fn = draw(st.sampled_from(sorted(LOSSES)))
    message = a_pass(MODEL, 0, loss_fn, seed=draw(st.integers(0, 3)))
    for _ in range(draw(st.sampled_from((0, 1, 1, 1, 2, 3)))):
        draw(st.sampled_from((*_VALUES * 2, *_FORMS, *_REST)))(draw, message)
    body: bytes = message.SerializeToString()
    ways = (
        "cut",
        "flips",
        "random",
        "zstd",
        "zstd cut",
        "zstd tail",
        "bomb",
        "gzip",
        "mislabelled",
    )
    way = draw(st.sampled_from(("whole",) * 14 + ways))
    encoding = "zstd" if way.startswith("zstd") else ""
    if way == "cut":
        body = body[: draw(st.integers(0, len(body)))]
    elif way == "flips":
        body = _flipped(draw, body)
    elif way == "random":
        body = draw(st.binary(max_size=200))
    elif way == "bomb":
        body, encoding = zstandard.ZstdCompressor().compress(body * 2000), "zstd"
    elif way in ("gzip", "mislabelled"):
        encoding = "gzip" if way == "gzip" else "zstd"
    if way.startswith("zstd"):
        body = zstandard.ZstdCompressor().compress(body)
        body = body[: -draw(st.integers(1, 9))] if way == "zstd cut" else body
        body += b"\x28\xb5\x2f\xfd" if way == "zstd tail" else b""
    return body, {"Content-Encoding": encoding} if encoding else {}


def _flipped(draw: st.DrawFn, body: bytes) -> bytes:
    flipped = bytearray(body)
    for at in draw(st.lists(st.integers(0, len(body) - 1), min_size=1, max_size=4)):
        flipped[at] = draw(st.integers(0, 255))
    return bytes(flipped)


class Tenant:
    """A model that bodies are sent for."""

    def __init__(self, hosted: HostedEngine) -> None:
        self._hosted = hosted
        self.model = hosted.model(hosted.session())
        assert len(self.model) == len(MODEL)
        self.seq = 0
        self.used = 0

    def send(self, body: bytes, headers: dict[str, str]) -> None:
        """Send it, and step, without momentum: answers in order, weights finite, or not moved."""
        self.used += 1
        before = self.probe()
        told = check(
            self._hosted.train(body.replace(MODEL.encode(), self.model.encode()), **headers)
        )
        refused = True
        if "request_id" in told:
            answer = self._hosted.answer(told["request_id"])
            refused = "error" in (check(answer) or ())
        step = {"model_id": self.model, "adam_params": {"learning_rate": 1e-3, "beta1": 0.0}}
        self._hosted.result(self._hosted.post("optim_step", step))
        after = self.probe()
        assert np.isfinite(after).all()
        if refused:
            assert (after == before).all()

    def probe(self) -> Any:
        """What the weights are, as seen from outside."""
        message = a_pass(self.model, 0)
        message.forward_only = True
        told = self._hosted.train(message.SerializeToString()).json()
        outputs = self._hosted.result(told).loss_fn_outputs
        return np.concatenate([row["logprobs"].to_numpy() for row in outputs])


def test_no_body_is_the_servers_fault(
    hosted: HostedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MAX_BODY_BYTES", 100_000)
    neighbour = hosted.model(hosted.session())
    undisturbed = hosted.model(hosted.session())
    tenants: list[Tenant] = []
    learnt: list[bytes] = []

    @tries(bodies=700)
    @given(bodies())
    def attempt(body: tuple[bytes, dict[str, str]]) -> None:
        if not tenants or tenants[-1].used == PER_MODEL:
            tenants.append(Tenant(hosted))
            learnt.append(hosted.learn(neighbour, 1 + 2 * len(learnt), 1))
        tenants[-1].send(*body)

    attempt()
    assert hosted.request("GET", "healthz").status_code == 200
    assert hosted.learn(undisturbed, 1, len(learnt)) == b"".join(learnt)
