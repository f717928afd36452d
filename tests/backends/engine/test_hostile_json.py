"""Locks: no JSON body, whatever is in it, is the server's fault, or touches another tenant.

Every answer is below 500, every ticket comes to a result or to a user's mistake, in short words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest
from backend_contract import write_base_model
from hosted_engine import HostedEngine, a_pass, check, hosted_engine
from hostile import encoded, spoilt, tries
from hypothesis import given
from hypothesis import strategies as st

from backends.engine.torch_backend import TorchBackend, TorchConfig


@pytest.fixture(scope="module")
def hosted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostedEngine]:
    home = tmp_path_factory.mktemp("hostile")
    base = str(write_base_model(home / "base"))
    config = TorchConfig(device="cpu", threads=1, max_lora_rank=8)
    with hosted_engine(base, home / "store", lambda: TorchBackend(base, config)) as hosted:
        yield hosted


# What a good body holds where it names something that is there: filled in as it is sent.
MODEL, SESSION, BASE, SAMPLER, PATH = "<model>", "<session>", "<base>", "<sampler>", "<path>"
SEQ = 777_777_777

GOOD: Final[dict[str, dict[str, Any]]] = {
    "create_session": {"tags": ["a"], "user_metadata": {"a": "b"}, "sdk_version": "1"},
    "session_heartbeat": {"session_id": SESSION},
    "create_model": {
        "session_id": SESSION,
        "model_seq_id": SEQ,
        "base_model": BASE,
        "lora_config": {"rank": 1, "seed": 1, "train_mlp": True, "train_attn": True},
        "optimizer_config": {"type": "adamw"},
        "user_metadata": {"a": "b"},
    },
    "get_info": {"model_id": MODEL},
    "optim_step": {
        "model_id": MODEL,
        "seq_id": SEQ,
        "adam_params": {
            "learning_rate": 0.1,
            "beta1": 0.9,
            "beta2": 0.95,
            "eps": 1e-12,
            "weight_decay": 0.1,
            "grad_clip_norm": 1.0,
        },
    },
    "save_weights": {
        "model_id": MODEL,
        "seq_id": SEQ,
        "path": "x",
        "ttl_seconds": 7200,
        "overwrite": True,
        "user_metadata": {"a": "b"},
    },
    "save_weights_for_sampler": {
        "model_id": MODEL,
        "seq_id": SEQ,
        "path": None,
        "sampling_session_seq_id": SEQ,
        "kind": "snapshot",
        "ttl_seconds": None,
    },
    "save_weights_external": {"model_id": MODEL, "seq_id": SEQ, "path": "x"},
    "load_weights": {"model_id": MODEL, "seq_id": SEQ, "path": PATH, "optimizer": True},
    "create_sampling_session": {
        "session_id": SESSION,
        "sampling_session_seq_id": SEQ,
        "base_model": BASE,
        "model_path": None,
    },
    "asample": {
        "sampling_session_id": SAMPLER,
        "seq_id": SEQ,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {
            "max_tokens": 3,
            "seed": 1,
            "stop": ["a", 5],
            "temperature": 1.0,
            "top_k": 3,
            "top_p": 0.9,
        },
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
        "prompt_logprobs_last_n": 2,
        "topk_sample_logprobs": 2,
        "prompt_alt_tokens_k": 2,
        "target_prompt_logprobs": {
            "data": [5, 6, 7],
            "dtype": "int64",
            "shape": [2, 2],
            "sparse_crow_indices": [0, 1, 3],
            "sparse_col_indices": [0, 0, 1],
        },
    },
    "retrieve_future": {"request_id": "x-1"},
    "weights_info": {"tinker_path": PATH},
    "copy_weights": {
        "source_path": PATH,
        "session_id": SESSION,
        "model_seq_id": SEQ,
        "ttl_seconds": 7200,
    },
    "sessions/search": {
        "session_id": SESSION,
        "user_metadata": {"a": "b"},
        "display_name": "x",
        "owner": {"type": "own", "owner_urns": []},
        "statuses": [{"type": "client_finished", "reasons": ["success"]}],
        "limit": 5,
        "cursor": {"last_created_at": "2026-01-01T00:00:00Z", "last_session_id": "x"},
    },
    "unload_model": {"model_id": MODEL},
    "client/config": {"sdk_version": "1"},
    "client/dynamic_config": {"sdk_version": "1"},
    "telemetry": {"events": [{"a": 1}]},
    "sessions/nobody/finish": {"reason": {"type": "success"}, "detail": "x"},
}
OFTEN: Final = (
    *("asample", "optim_step", "optim_step", "save_weights_for_sampler", "save_weights"),
    *("load_weights", "create_model", "create_sampling_session"),
)
"""What has most in it that can be wrong."""
PER_TENANT: Final = 20
"""Bodies that are sent in one tenant's name."""


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes, dict[str, str]]:
    """One request: where to, body and headers."""
    path = draw(st.sampled_from((*sorted(GOOD), *OFTEN * 4)))
    return path, *draw(encoded(draw(spoilt(GOOD[path]))))


class Tenant:
    """A session with a model and a sampler, whose names are put into bodies."""

    def __init__(self, hosted: HostedEngine) -> None:
        self._hosted = hosted
        self.used = 0
        session = hosted.session()
        model = hosted.model(session)
        hosted.learn(model, 1, 1)
        save = {"model_id": model, "seq_id": 3, "sampling_session_seq_id": 0}
        sampler = hosted.result(hosted.post("save_weights_for_sampler", save))
        state = hosted.post("save_weights", {"model_id": model, "seq_id": 4, "path": "kept"})
        self._names = {
            MODEL: model,
            SESSION: session,
            BASE: hosted.base_model,
            SAMPLER: sampler["sampling_session_id"],
            PATH: hosted.result(state)["path"],
        }
        self._seq = 4

    def send(self, path: str, body: bytes, headers: dict[str, str]) -> Any:
        """Send it; answer and, if it made a ticket, result have to be in order. The latter."""
        self._seq += 1
        self.used += 1
        for name, value in self._names.items():
            body = body.replace(name.encode(), value.encode())
        if path == "optim_step":  # bad settings show with a gradient only
            check(self._hosted.train(a_pass(self._names[MODEL], self._seq).SerializeToString()))
            self._seq += 1
        body = body.replace(b"%d" % SEQ, b"%d" % self._seq)
        told = check(self._hosted.request("POST", path, content=body, headers=headers))
        if not isinstance(told, dict) or "request_id" not in told:
            return told
        result = check(self._hosted.answer(told["request_id"]))
        if isinstance(result, dict) and "sampling_session_id" in result:
            self._names[SAMPLER] = result["sampling_session_id"]
        return result


def test_no_body_is_the_servers_fault(hosted: HostedEngine) -> None:
    neighbour = hosted.model(hosted.session())
    undisturbed = hosted.model(hosted.session())
    tenants: list[Tenant] = []
    learnt: list[bytes] = []

    @tries(bodies=1000)
    @given(requests())
    def attempt(request: tuple[str, bytes, dict[str, str]]) -> None:
        if not tenants or tenants[-1].used == PER_TENANT:
            tenants.append(Tenant(hosted))
            learnt.append(hosted.learn(neighbour, 1 + 2 * len(learnt), 1))
        tenants[-1].send(*request)

    attempt()
    assert hosted.request("GET", "healthz").status_code == 200
    assert hosted.learn(undisturbed, 1, len(learnt)) == b"".join(learnt)


@pytest.mark.parametrize("path", GOOD)
def test_good_bodies_are_good(hosted: HostedEngine, path: str) -> None:
    """What is spoilt above would else be taken, if what it names is there."""
    told = Tenant(hosted).send(path, json.dumps(GOOD[path]).encode(), {})
    nobody = path in ("retrieve_future", "sessions/nobody/finish")
    assert ("error" in (told or ()), "detail" in (told or ())) == (False, nobody), told
