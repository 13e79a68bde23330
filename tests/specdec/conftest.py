"""Checkpoints that are written once a test process, and a check of every launch of a Triton kernel."""

from collections.abc import Iterator

import pytest

from tests.kernels.recorded_launches import check_recorded
from tests.simulated_gpu import SimulatedGPU, simulated_gpu
from tests.specdec.structured.checkpoints import Bytes, save_bytes, save_thinking
from tests.specdec.tiny_checkpoints import Tiny, save_tiny
from tests.specdec.world import World, make_world
from tests.triton_launches import Launch, recorded_launches

LAUNCHES = pytest.StashKey[dict[str, Launch]]()


@pytest.fixture(autouse=True, scope="session")
def launches(request: pytest.FixtureRequest, triton_interpreter: None) -> Iterator[dict[str, Launch]]:  # noqa: ARG001
    """The launches of Triton kernels since the last test."""
    with recorded_launches() as found:
        request.config.stash[LAUNCHES] = found
        yield found


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Forget what tests of other folders have launched in this process since; it comes before any fixture."""
    item.config.stash.get(LAUNCHES, {}).clear()


@pytest.fixture(autouse=True)
def checked_launches(launches: dict[str, Launch]) -> Iterator[None]:
    """Engines launch kernels as was recorded, so that all of it has been compiled for GPUs."""
    yield
    found = dict(launches)
    launches.clear()
    check_recorded(found)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedGPU]:
    """The simulated GPUs, entered."""
    with simulated_gpu(monkeypatch) as gpu:
        yield gpu


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def bytes_model(tmp_path_factory: pytest.TempPathFactory) -> Bytes:
    return save_bytes(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="session")
def thinking_model(tmp_path_factory: pytest.TempPathFactory, bytes_model: Bytes) -> Bytes:
    return save_thinking(tmp_path_factory.mktemp("thinking") / "target", bytes_model)
