"""One engine for all of the conformance tests, and what several of them start from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tinker
import torch
from tinker import types

from tests.backends.engine.engine_process import EngineProcess, engine
from tests.conformance.bench import READ_GRADIENT, Bench, train
from tests.conformance.reference import MODEL, Reference


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """The reference leaves the other core to the engine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine for every test; it has to end well, without a traceback in its log."""
    home = tmp_path_factory.mktemp("conformance")
    with engine(MODEL, home / "store", "--exit-with-parent", log=home / "log") as running:
        running.wait_ready()
        yield running
        assert running.close_stdin() == 0
    assert "Traceback" not in (home / "log").read_text()


@pytest.fixture(scope="session")
def bench(running: EngineProcess) -> Iterator[Bench]:
    """A session with that engine."""
    bench = Bench(running.url, running.log.parent / "store")
    yield bench
    bench.service.close("success").result()


@pytest.fixture(scope="session")
def base() -> Reference:
    """The base model alone."""
    return Reference()


@pytest.fixture(scope="session")
def far(bench: Bench) -> str:
    """A saved state whose adapter is far from 0 in every matrix, A and B."""
    client = bench.client(rank=8, seed=5)
    train(client, range(900, 904), types.AdamParams(learning_rate=1e-2))
    return client.save_state("far").result().path


@pytest.fixture(scope="session")
def reference(bench: Bench, far: str) -> Reference:
    """The same weights as `far`."""
    return Reference(bench.folder(far))


@pytest.fixture(scope="session")
def _learner(bench: Bench, far: str) -> tinker.TrainingClient:
    return bench.resumed(far)


@pytest.fixture
def learner(_learner: tinker.TrainingClient) -> tinker.TrainingClient:
    """A client at `far` without accumulated gradients, whose weights no test moves."""
    _learner.optim_step(READ_GRADIENT).result()
    return _learner
