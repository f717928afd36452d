"""The SDK's `RestClient` against an engine in a process of its own, and after a restart of it.

The last part is raw: what belongs to the hosted service alone, bad queries, the OpenAPI document.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from backend_contract import CONTEXT, write_base_model
from engine_process import KEY, EngineProcess, engine
from safetensors.numpy import load_file
from tinker import types

HOUR = 3600


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the base model, the store and the log lie."""
    folder = tmp_path_factory.mktemp("rest")
    write_base_model(folder / "base")
    return folder


@contextmanager
def started(home: Path) -> Iterator[EngineProcess]:
    """An engine on the module's store; its log holds neither failures nor keys."""
    with engine(home / "base", home / "store", log=home / "log") as running:
        running.wait_ready()
        yield running
    log = (home / "log").read_text()
    assert "Traceback" not in log
    assert KEY not in log


@pytest.fixture(scope="module")
def running(home: Path) -> Iterator[EngineProcess]:
    with started(home) as running:
        yield running


@pytest.fixture(scope="module")
def service(running: EngineProcess) -> Iterator[tinker.ServiceClient]:
    service = tinker.ServiceClient(
        base_url=running.url,
        api_key=KEY,
        user_metadata={"team": "red"},
        display_name="Nightly run",
    )
    yield service
    service.close("success").result()


@pytest.fixture(scope="module")
def rest(running: EngineProcess) -> tinker.RestClient:
    return tinker.RestClient(base_url=running.url, api_key=KEY)


@pytest.fixture(scope="module")
def raw(running: EngineProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{running.url}/api/v1", headers={"X-API-Key": KEY}) as http:
        yield http


def new_client(service: tinker.ServiceClient, home: Path, **more: Any) -> tinker.TrainingClient:
    options: dict[str, Any] = {"rank": 4, "seed": 0} | more
    return service.create_lora_training_client(str(home / "base"), **options).result()


def train(client: tinker.TrainingClient) -> None:
    """One step, so that the weights are no longer those of a fresh adapter."""
    inputs: dict[str, Any] = {"target_tokens": np.array([6, 7, 8])}
    datum = types.Datum(model_input=types.ModelInput.from_ints([5, 6, 7]), loss_fn_inputs=inputs)
    client.forward_backward([datum], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()


def run_id(path: str) -> str:
    return types.ParsedCheckpointTinkerPath.from_tinker_path(path).training_run_id


def found(rest: tinker.RestClient, path: str) -> types.Checkpoint:
    """The checkpoint as it is listed."""
    listed = rest.list_checkpoints(run_id(path)).result().checkpoints
    return next(checkpoint for checkpoint in listed if checkpoint.tinker_path == path)


# -- training runs and checkpoints -------------------------------------------------------------


def test_capabilities_and_health(
    rest: tinker.RestClient, running: EngineProcess, home: Path
) -> None:
    (model,) = rest.get_server_capabilities().result().supported_models
    assert model.model_dump() == {
        "model_name": str(home / "base"),
        "max_context_length": CONTEXT,
        "trainable": True,
        "sampleable": True,
    }
    assert httpx.get(f"{running.url}/api/v1/healthz").json() == {"status": "ok"}


def test_a_training_run(service: tinker.ServiceClient, rest: tinker.RestClient, home: Path) -> None:
    before = datetime.now(UTC)
    client = new_client(service, home, rank=3, user_metadata={"owner": "me"})
    run = rest.get_training_run(client.model_id).result()
    assert run.training_run_id == client.model_id
    assert (run.base_model, run.is_lora, run.lora_rank) == (str(home / "base"), True, 3)
    assert (run.corrupted, run.user_metadata) == (False, {"owner": "me"})
    assert (run.last_checkpoint, run.last_sampler_checkpoint) == (None, None)
    assert before < run.last_request_time < datetime.now(UTC)
    paths = [client.save_state(name).result().path for name in ("one", "two")]
    sampler = client.save_weights_for_sampler("sampler").result().path
    for path in (*paths, sampler):
        run = rest.get_training_run_by_tinker_path(path).result()
        assert run.last_checkpoint is not None
        assert run.last_sampler_checkpoint is not None
        assert run.last_checkpoint.tinker_path == paths[1]
        assert run.last_sampler_checkpoint.tinker_path == sampler
    listed = rest.list_checkpoints(client.model_id).result().checkpoints
    assert [(c.checkpoint_id, c.checkpoint_type, c.public) for c in listed] == [
        ("weights/one", "training", False),
        ("weights/two", "training", False),
        ("sampler_weights/sampler", "sampler", False),
    ]
    assert all(c.size_bytes and before < c.time and c.expires_at is None for c in listed)


def test_training_runs_page_by_page(
    service: tinker.ServiceClient, rest: tinker.RestClient, home: Path
) -> None:
    clients = [new_client(service, home) for _ in range(3)]
    first = rest.list_training_runs(limit=2).result()
    total = first.cursor.total_count
    assert (first.cursor.offset, first.cursor.limit, total >= 3) == (0, 2, True)
    newest = [client.model_id for client in reversed(clients)]
    assert [run.training_run_id for run in first.training_runs] == newest[:2]
    second = rest.list_training_runs(limit=2, offset=2, access_scope="accessible").result()
    assert second.training_runs[0].training_run_id == newest[2]
    everything = rest.list_training_runs(limit=1000).result().training_runs
    assert len({run.training_run_id for run in everything}) == len(everything) == total
    with pytest.raises(tinker.BadRequestError, match="this engine has no projects"):
        rest.list_training_runs(project_id="mine").result()


def test_everybodys_checkpoints_page_by_page(
    service: tinker.ServiceClient, rest: tinker.RestClient, home: Path
) -> None:
    client = new_client(service, home)
    paths = [client.save_state(str(number)).result().path for number in range(3)]
    page = rest.list_user_checkpoints(limit=2).result()
    assert [c.tinker_path for c in page.checkpoints] == [paths[2], paths[1]]
    assert page.cursor is not None
    following = rest.list_user_checkpoints(limit=1, offset=2).result()
    assert [c.tinker_path for c in following.checkpoints] == [paths[0]]
    rest.delete_checkpoint(client.model_id, "weights/0").result()
    rest.delete_checkpoint_from_tinker_path(paths[1]).result()
    listed = rest.list_checkpoints(client.model_id).result().checkpoints
    assert [c.checkpoint_id for c in listed] == ["weights/2"]
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        rest.delete_checkpoint_from_tinker_path(paths[1]).result()
    total = rest.list_user_checkpoints().result().cursor
    assert total is not None
    assert total.total_count == page.cursor.total_count - 2


def test_weights_info(service: tinker.ServiceClient, rest: tinker.RestClient, home: Path) -> None:
    client = new_client(service, home, rank=2, train_mlp=False)
    path = client.save_state("x").result().path
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.is_lora, info.lora_rank) == (str(home / "base"), True, 2)
    assert (info.train_attn, info.train_mlp, info.train_unembed) == (True, False, True)
    with pytest.raises(tinker.BadRequestError, match="there is no checkpoint"):
        rest.get_weights_info_by_tinker_path(path + "y").result()


def test_publishing(service: tinker.ServiceClient, rest: tinker.RestClient, home: Path) -> None:
    client = new_client(service, home)
    path = client.save_state("x", ttl_seconds=2 * HOUR).result().path
    expires = found(rest, path).expires_at
    for _ in range(2):  # once more changes nothing, and is no mistake
        rest.publish_checkpoint_from_tinker_path(path).result()
        assert found(rest, path).public
    run = rest.get_training_run_by_tinker_path(path).result()
    assert run.last_checkpoint is not None
    assert (run.last_checkpoint.public, run.last_checkpoint.expires_at) == (True, expires)
    for _ in range(2):
        rest.unpublish_checkpoint_from_tinker_path(path).result()
        assert not found(rest, path).public
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        rest.publish_checkpoint_from_tinker_path(path + "y").result()


def test_times_to_live(service: tinker.ServiceClient, rest: tinker.RestClient, home: Path) -> None:
    client = new_client(service, home)
    path = client.save_state("x", ttl_seconds=HOUR).result().path
    sampler = client.save_weights_for_sampler("x", ttl_seconds=2 * HOUR).result().path
    for saved, hours in ((path, 1), (sampler, 2)):
        expires = found(rest, saved).expires_at
        assert expires is not None
        left = expires - datetime.now(UTC)
        assert timedelta(hours=hours, minutes=-1) < left < timedelta(hours=hours)
    rest.set_checkpoint_ttl_from_tinker_path(path, 24 * HOUR).result()
    expires = found(rest, path).expires_at
    assert expires is not None
    assert timedelta(hours=23) < expires - datetime.now(UTC) < timedelta(hours=25)
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert found(rest, path).expires_at is None
    for seconds in (HOUR - 1, 0, -1, 12 * 366 * 24 * HOUR):
        with pytest.raises(tinker.BadRequestError, match=r"ttl_seconds: .*greater|less"):
            rest.set_checkpoint_ttl_from_tinker_path(path, seconds).result()
        with pytest.raises(tinker.RequestFailedError, match=r"ttl_seconds: .*greater|less"):
            client.save_state("y", ttl_seconds=seconds).result()
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        rest.set_checkpoint_ttl_from_tinker_path(path + "y", HOUR).result()


def test_copies(service: tinker.ServiceClient, rest: tinker.RestClient, home: Path) -> None:
    client = new_client(service, home)
    train(client)
    for path in (client.save_state("x"), client.save_weights_for_sampler("x")):
        source = path.result().path
        copy = rest.copy_weights(source, "anywhere", ttl_seconds=2 * HOUR).result()
        assert copy.rpartition("/")[2] == "x"
        assert run_id(copy) != run_id(source)
        assert found(rest, copy).checkpoint_type == found(rest, source).checkpoint_type
        assert found(rest, copy).expires_at is not None
        assert rest.get_training_run_by_tinker_path(copy).result().lora_rank == 4
        rest.delete_checkpoint_from_tinker_path(source).result()
        if "sampler" in copy:
            sampler = service.create_sampling_client(model_path=copy).result()
            prompt = types.ModelInput.from_ints([1])
            drawn = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result()
            assert len(drawn.sequences[0].tokens) == 1
        else:
            resumed = service.create_training_client_from_state_with_optimizer(copy).result()
            train(resumed)
    with pytest.raises(tinker.BadRequestError, match="there is no checkpoint"):
        rest.copy_weights(source, "anywhere").result()


def test_a_copy_by_the_service_client(
    running: EngineProcess, service: tinker.ServiceClient, home: Path
) -> None:
    source = new_client(service, home).save_state("x").result().path
    with tinker.ServiceClient(base_url=running.url, api_key=KEY, project_id="any") as other:
        copy = other.copy_weights(source).result()
        loaded = other.create_training_client_from_state(copy).result()
        assert loaded.get_info().lora_rank == 4


def test_copies_that_are_asked_for_again(
    service: tinker.ServiceClient, raw: httpx.Client, home: Path
) -> None:
    client = new_client(service, home)
    body: dict[str, Any] = {"source_path": client.save_state("x").result().path}
    body["destination_project_id"] = "p"
    headers = {"X-Idempotency-Key": "one"}
    answers = [raw.post("copy_weights", json=body, headers=headers) for _ in range(2)]
    other = raw.post("copy_weights", json=body, headers={"X-Idempotency-Key": "two"})
    paths = [answer.json()["tinker_path"] for answer in (*answers, other)]
    assert paths[0] == paths[1] != paths[2]
    session = service.holder.get_session_id()
    into = {"source_path": body["source_path"], "session_id": session, "model_seq_id": 1000}
    for _ in range(2):
        path = raw.post("copy_weights", json=into).json()["tinker_path"]
        assert path == f"tinker://{session}:train:1000/weights/x"
    number = int(client.model_id.rpartition(":")[2])
    for change, said in (
        ({"model_seq_id": number}, f"model_seq_id: {number} is taken in this session"),
        ({"model_seq_id": None}, "model_seq_id: is missing"),
        ({"session_id": None}, "destination_project_id: is missing"),
        ({"source_path": "x"}, "is not the URI of a checkpoint"),
        ({"ttl_seconds": 5}, "ttl_seconds: Input should be greater"),
    ):
        answer = raw.post("copy_weights", json=into | change)
        assert (answer.status_code, said in answer.json()["detail"]) == (400, True), answer.text


def test_names_are_taken_once(service: tinker.ServiceClient, home: Path) -> None:
    client = new_client(service, home)
    first = client.save_state("x").result().path
    with pytest.raises(
        tinker.RequestFailedError, match=r"there is a checkpoint .* already"
    ) as told:
        client.save_state("x").result()
    assert told.value.category == types.RequestErrorCategory.User
    assert client.save_state("x", overwrite=True).result().path == first
    assert client.save_state("n" * 255).result().path.endswith("/" + "n" * 255)
    for name in ("n" * 256, "../x", "a/b", "", ".", "a\0"):
        with pytest.raises(tinker.RequestFailedError, match=r"path: (.|\n)*take one path segment"):
            client.save_state(name).result()


# -- downloads ---------------------------------------------------------------------------------


def test_a_download_needs_no_key_but_a_signature(
    service: tinker.ServiceClient, rest: tinker.RestClient, home: Path, tmp_path: Path
) -> None:
    client = new_client(service, home)
    train(client)
    named = client.save_weights_for_sampler("x").result().path
    path = client.save_weights_external("für PEFT", ttl_seconds=HOUR).result().path
    assert path == f"tinker://{client.model_id}/external_weights/für PEFT"
    assert found(rest, path).checkpoint_type == "external"
    answer = rest.get_external_weights_urls(path).result()
    left = answer.expires - datetime.now(UTC)
    assert timedelta(minutes=50) < left <= timedelta(hours=1)
    assert set(answer.urls) == {"adapter_model.safetensors", "adapter_config.json"}
    for name, url in answer.urls.items():
        with urllib.request.urlopen(url) as response:
            (tmp_path / name).write_bytes(response.read())
    saved = home / "store" / client.model_id.replace(":", "_") / "sampler_weights" / "x"
    expected = load_file(saved / "adapter_model.safetensors")
    downloaded = load_file(tmp_path / "adapter_model.safetensors")
    assert downloaded.keys() == expected.keys()
    assert all((downloaded[name] == expected[name]).all() for name in expected)
    forged = [
        url.replace("signature=", "signature=0"),
        url.replace("expires=", "expires=1"),
        url.replace("/adapter", "/other_adapter"),
        url.partition("?")[0],
    ]
    for address in forged:
        with pytest.raises(urllib.error.HTTPError, match="403") as refused:
            urllib.request.urlopen(address)
        refused.value.close()
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(urllib.error.HTTPError, match="404") as gone:
        urllib.request.urlopen(url)
    gone.value.close()
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        rest.get_external_weights_urls(path).result()
    assert found(rest, named).checkpoint_type == "sampler"


# -- sessions ----------------------------------------------------------------------------------


def test_sessions_and_samplers(
    service: tinker.ServiceClient, rest: tinker.RestClient, home: Path
) -> None:
    client = new_client(service, home)
    session_id = service.holder.get_session_id()
    sampling = service.create_sampling_client(base_model=str(home / "base")).result()
    session = rest.get_session(session_id).result()
    assert client.model_id in session.training_run_ids
    assert sampling._sampling_session_id in session.sampler_ids
    assert (session.user_metadata, session.display_name) == ({"team": "red"}, "Nightly run")
    assert session_id in rest.list_sessions(access_scope="accessible").result().sessions
    assert len(rest.list_sessions(limit=1).result().sessions) == 1
    sampler = rest.get_sampler(sampling._sampling_session_id).result()
    assert (sampler.base_model, sampler.model_path) == (str(home / "base"), None)
    named = client.save_weights_for_sampler("x").result().path
    sampling = service.create_sampling_client(model_path=named).result()
    assert rest.get_sampler(sampling._sampling_session_id).result().model_path == named
    with pytest.raises(tinker.NotFoundError, match="there is no session none"):
        rest.get_session("none").result()
    with pytest.raises(tinker.NotFoundError, match="sampler none is not known"):
        rest.get_sampler("none").result()
    with pytest.raises(tinker.NotFoundError, match="there is no training run none"):
        rest.get_training_run("none").result()


@pytest.mark.filterwarnings("ignore:.*experimental")
def test_searching_sessions(running: EngineProcess, rest: tinker.RestClient, home: Path) -> None:
    names = ["alpha one", "Alpha two", "beta"]
    ids = []
    for number, name in enumerate(names):
        with tinker.ServiceClient(
            base_url=running.url, api_key=KEY, display_name=name, user_metadata={"n": str(number)}
        ) as service:
            new_client(service, home).save_state("x").result()
            ids.append(service.holder.get_session_id())

    def search(**query: Any) -> list[str | None]:
        request = types.SessionSearchRequest(**query)
        return [s.display_name for s in rest.search_sessions(request).result().sessions]

    assert search(display_name="ALPHA") == ["Alpha two", "alpha one"]
    assert search(display_name="two alpha") == ["Alpha two"]
    assert search(session_id=ids[2]) == ["beta"]
    assert search(user_metadata={"n": "1"}) == ["Alpha two"]
    finished = types.ClientFinishedSessionStatusQuery(reasons=["success"])
    assert search(statuses=[finished])[:3] == names[::-1]
    assert search(statuses=[types.ActiveSessionStatusQuery()], display_name="alpha") == []
    request = types.SessionSearchRequest(limit=2, statuses=[finished])
    first = rest.search_sessions(request).result()
    assert [(s.checkpoints_count, s.owner) for s in first.sessions] == [(1, "engine")] * 2
    assert first.next_cursor is not None
    request = request.model_copy(update={"cursor": first.next_cursor})
    assert rest.search_sessions(request).result().sessions[0].display_name == names[0]


# -- what this engine does not have ------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:DEPRECATED")
def test_what_the_hosted_service_alone_has(
    rest: tinker.RestClient, running: EngineProcess, raw: httpx.Client
) -> None:
    admin = tinker.AdminClient(base_url=running.url, api_key=KEY)
    calls = [
        (lambda: admin.get_audit_log(), "audit log"),
        (lambda: admin.get_billing_usage("2026-01-01", "2026-02-01"), "billing"),
        (lambda: admin.get_current_checkpoint_storage_usage(), "billing"),
        (lambda: rest.assign_session_project("s", "p"), "projects"),
        (lambda: rest.export_session_trace("s"), "traces of sessions"),
    ]
    for call, what in calls:
        with pytest.raises(tinker.NotFoundError, match=f"this engine has no {what}"):
            call().result()
    answer = raw.get("nowhere")
    assert answer.status_code == 404
    assert answer.json() == {"detail": "GET /api/v1/nowhere: Not Found"}
    answer = raw.get("optim_step")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("GET", "training_runs?limit=x", 400, "limit: is 'x'"),
        ("GET", "training_runs?offset=-1", 400, "offset: is '-1'"),
        ("GET", "training_runs?access_scope=all", 400, "access_scope: is 'all'"),
        ("GET", "sessions?limit=1e9", 400, "limit: is '1e9'"),
        ("GET", "checkpoints?offset=99999999999", 400, "offset: is"),
        ("GET", "training_runs/x?access_scope=", 400, "access_scope: is ''"),
        ("GET", "training_runs/..%2Fx", 404, ""),
        ("GET", "training_runs/a%00b", 404, "no training run"),
        ("GET", "sessions/%F0%9F%92%A9", 404, "no session"),
        ("DELETE", "training_runs/m/checkpoints/other/x", 400, "is not the URI of a checkpoint"),
        ("DELETE", "training_runs/m%20/checkpoints/weights/x", 400, "is not the URI"),
        ("DELETE", "training_runs/m/checkpoints/weights/%2e%2e", 400, "is no name"),
        ("DELETE", "training_runs/m/checkpoints/weights/*", 400, "holds '*'"),
        ("DELETE", "training_runs/m/checkpoints/weights/x", 404, "there is no checkpoint"),
        ("POST", "training_runs/m/checkpoints/weights/x/publish", 404, "there is no checkpoint"),
        ("DELETE", "training_runs/m/checkpoints/weights/x/publish", 404, "there is no checkpoint"),
        ("PUT", "training_runs/m/checkpoints/weights/x/ttl", 400, "body"),
        ("GET", "training_runs/m/checkpoints/weights/x/archive", 404, "there is no checkpoint"),
        ("GET", "training_runs/m/checkpoints/weights/x/external_weights_urls", 400, "kind: "),
        ("POST", "sessions/search", 400, "body"),
        ("POST", "sessions/x/finish", 400, "body"),
        ("GET", "external_weights/m/x/y?expires=x&signature=%C3%BC", 403, "was not signed"),
    ],
)
def test_bad_paths_and_queries(
    raw: httpx.Client, method: str, path: str, status: int, said: str
) -> None:
    answer = raw.request(method, path)
    assert (answer.status_code, said in answer.json()["detail"]) == (status, True), answer.text


def test_its_own_description(running: EngineProcess, raw: httpx.Client) -> None:
    answer = httpx.get(f"{running.url}/openapi.json", headers={"X-API-Key": KEY})
    document = answer.json()
    paths = document["paths"]
    ttl = paths["/api/v1/training_runs/{model_id}/checkpoints/{kind}/{name}/ttl"]["put"]
    assert [(p["name"], p["in"], p["required"]) for p in ttl["parameters"]] == [
        (name, "path", True) for name in ("model_id", "kind", "name")
    ]
    assert set(ttl["responses"]) == {"204", "400", "401", "404", "503"}
    assert paths["/api/v1/healthz"]["get"]["security"] == []

    def check(node: Any) -> None:
        """Every reference leads somewhere."""
        if isinstance(node, dict):
            if "$ref" in node:
                name = node["$ref"].removeprefix("#/components/schemas/")
                assert name in document["components"]["schemas"], node
            node = list(node.values())
        for inner in node if isinstance(node, list) else ():
            check(inner)

    check(document)
    # Only what is said there is answered, for a body that is none and ids that are nobody's.
    for path, operations in paths.items():
        for method, operation in operations.items():
            filled = path.replace("{kind}", "weights").replace("{model_id}", "m")
            filled = filled.replace("{session_id}", "s").replace("{sampler_id}", "s")
            filled = filled.replace("{name}", "n").replace("{file}", "f")
            address = f"{running.url}{filled}"
            got = raw.request(method.upper(), address, content=b"{" if method != "get" else None)
            assert str(got.status_code) in operation["responses"], (method, path, got.text)


# -- a restart (last: it uses an engine of its own on the same store) ----------------------------


def test_it_is_all_there_after_a_restart(
    service: tinker.ServiceClient, rest: tinker.RestClient, home: Path
) -> None:
    client = new_client(service, home, rank=5)
    train(client)
    path = client.save_state("kept", user_metadata={"step": "1"}).result().path
    rest.publish_checkpoint_from_tinker_path(path).result()
    rest.set_checkpoint_ttl_from_tinker_path(path, HOUR).result()
    before = rest.list_user_checkpoints(limit=1000).result()
    with started(home) as second:
        later = tinker.RestClient(base_url=second.url, api_key=KEY)
        assert later.list_user_checkpoints(limit=1000).result() == before
        run = later.get_training_run(client.model_id).result()
        assert (run.base_model, run.lora_rank, run.corrupted) == (str(home / "base"), 5, False)
        assert run.last_checkpoint == found(rest, path)
        assert run.last_checkpoint is not None
        assert run.last_checkpoint.public
        assert run.last_checkpoint.user_metadata == {"step": "1"}
        runs = later.list_training_runs(limit=1000).result().training_runs
        assert {r.training_run_id for r in runs} == {
            run_id(c.tinker_path) for c in before.checkpoints
        }
        with tinker.ServiceClient(base_url=second.url, api_key=KEY) as new:
            train(new.create_training_client_from_state_with_optimizer(path).result())
            headers = {"X-API-Key": KEY}
            body = {"model_id": client.model_id}
            answer = httpx.post(f"{second.url}/api/v1/get_info", json=body, headers=headers)
            assert answer.status_code == 404
            assert "it may have been restarted since" in answer.json()["detail"]
