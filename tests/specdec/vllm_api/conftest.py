"""A small engine with a tokenizer and a chat template."""

from collections.abc import Iterator

import pytest

from specdec import LLM, DraftShape
from tests.specdec.tiny_checkpoints import Tiny


@pytest.fixture(scope="session")
def llm(tiny: Tiny) -> Iterator[LLM]:
    """Nothing is measured, so that it is there at once."""
    shape = DraftShape(3, 2, 6)
    found = LLM(tiny.target, tiny.head, dtype="float64", shape=shape, adaptive_drafts=False, prefill_stretch=0)
    yield found
    assert not found.engine.has_unfinished
    assert found.stats().kv_usage == 0
