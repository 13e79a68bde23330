"""What engines leave to Python's garbage collector, whose full collections stop all requests: as little as can be."""

import asyncio
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest

from specdec import LLM, DraftShape, SamplingParams, StructuredOutputsParams
from specdec.async_engine.async_llm import AsyncLLM
from specdec.core.request import Request
from specdec.engine.engine import LLMEngine
from tests.specdec.world import DRAFTS, World

pytestmark = pytest.mark.slow

TEXT = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0, "seed": 1},
    "several": {"temperature": 1.0, "seed": 1, "n": 3},
    "penalties": {"temperature": 0, "repetition_penalty": 1.2, "bad_words": ["a"]},
    "logprobs": {"temperature": 0, "logprobs": 2, "prompt_logprobs": 2},
    "stop strings": {"temperature": 0, "stop": ["zzz"]},
    "structured": {"temperature": 0, "structured_outputs": StructuredOutputsParams(regex="[a-z]{3,9}")},
    "predicted": {"temperature": 0, "prediction": TEXT * 2},
}


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[WeakSet[Request]]:
    """Requests that are still held, while no garbage is collected."""
    found, begin = WeakSet[Request](), Request.__post_init__

    def init(request: Request) -> None:
        begin(request)
        found.add(request)

    monkeypatch.setattr(Request, "__post_init__", init)
    gc.disable()
    yield found
    gc.enable()


@pytest.mark.parametrize("draft", [*DRAFTS, "ngram", "suffix"])
def test_requests_are_freed_when_they_end(world: World, requests: WeakSet[Request], draft: str) -> None:
    drafter = world.draft(draft) if draft in DRAFTS else draft
    with LLM(world.folder / "target", drafter, shape=DraftShape(2, 2, 4), block_size=8, max_model_len=64) as llm:
        for name, given in PARAMS.items():
            params = SamplingParams(max_tokens=12, ignore_eos=True, **given)
            llm.generate([TEXT, TEXT[1:]], params, use_tqdm=False)
            # The choice of trees for the next requests forgets these.
            llm.generate([TEXT], SamplingParams(max_tokens=6, temperature=0), use_tqdm=False)
            assert len(requests) <= 1, name


PLUGIN = """
import gc, os, sys
from specdec.engine.engine import LLMEngine

run = LLMEngine.run

def told(self, *given, **named):
    with open(os.path.join({folder!r}, str(os.getpid())), "w") as file:
        file.write(f"{{gc.isenabled()}} {{gc.get_freeze_count()}} {{len(gc.get_objects())}}")
    return run(self, *given, **named)

LLMEngine.run = told
"""


@pytest.mark.long
def test_an_engine_process_exempts_what_it_has_loaded(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So do its other ranks."""
    (told := tmp_path / "told").mkdir()
    (tmp_path / "telling.py").write_text(PLUGIN.format(folder=str(told)))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(LLMEngine, "run", LLMEngine.run)

    async def ask() -> None:
        settings = {"plugins": ["telling"], "threads": 1, "tensor_parallel_size": 2, "max_model_len": 64}
        async with AsyncLLM(world.folder / "target", None, **settings) as llm:
            async for _ in llm.generate(TEXT, SamplingParams(max_tokens=2)):
                pass

    asyncio.run(ask())
    processes = [file.read_text().split() for file in told.iterdir()]
    assert len(processes) == 2
    for is_enabled, exempt, collected in processes:
        assert is_enabled == "True"
        assert int(exempt) > 100_000
        assert int(collected) < 20_000
