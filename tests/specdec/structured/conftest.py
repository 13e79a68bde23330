"""Checkpoints that are written once a test process."""

import pytest

from tests.specdec.structured.checkpoints import Bytes, save_bytes


@pytest.fixture(scope="session")
def bytes_model(tmp_path_factory: pytest.TempPathFactory) -> Bytes:
    return save_bytes(tmp_path_factory.mktemp("bytes"))
