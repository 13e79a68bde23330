"""Checkpoints that are written once a test process."""

import pytest

from tests.specdec.structured.checkpoints import Bytes, save_bytes
from tests.specdec.tiny_checkpoints import Tiny, save_tiny
from tests.specdec.world import World, make_world


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def bytes_model(tmp_path_factory: pytest.TempPathFactory) -> Bytes:
    return save_bytes(tmp_path_factory.mktemp("bytes"))
