"""One engine process for all tests of the server."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from specdec import LLM, DraftShape
from specdec.async_engine.async_llm import AsyncLLM
from tests.fakes import edit_json
from tests.specdec.server.running import Served, engine_in_thread
from tests.specdec.tiny_checkpoints import Tiny, save_tiny

# Long enough that a request runs while a test does something to it.
CONTEXT = 8192
SETTINGS: dict[str, Any] = {
    "dtype": "float64",
    "shape": DraftShape(3, 2, 6),
    "kv_cache_memory": 24 << 20,
    "adaptive_drafts": False,
    "enable_lora": True,
    "max_loras": 2,
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Checkpoints with a long context."""
    tiny = save_tiny(tmp_path_factory.mktemp("served"))
    for folder in (tiny.target, tiny.head, tiny.bare):
        edit_json(folder / "config.json", max_position_embeddings=CONTEXT)
    return tiny


@pytest.fixture(scope="session")
def engine(folders: Tiny) -> Iterator[Served]:
    offline = LLM(folders.target, folders.head, **SETTINGS)
    with engine_in_thread(AsyncLLM(folders.target, folders.head, **SETTINGS), offline) as served:
        yield served


@pytest.fixture(scope="session")
def server(engine: Served) -> Iterator[Served]:
    with engine.again(served_model_name=["tiny", "other"]) as served:
        yield served


@pytest.fixture(scope="session")
def connected(server: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def client(connected: OpenAI) -> OpenAI:
    """OpenAI's package, which refuses answers that are not of its types."""
    own = connected.with_options()
    own._strict_response_validation = True
    return own
