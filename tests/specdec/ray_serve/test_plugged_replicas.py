"""A replica on Ray Serve whose engine has a plug-in's draft source. Not a part of CI: it needs Ray."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from specdec import LLM
from tests.specdec.documented_plugins import EXAMPLES
from tests.specdec.ray_serve.streams import RECOVERY, run, stream, texts
from tests.specdec.server.running import Served, engine_in_thread

pytest.importorskip("ray", reason="the package ray is not installed: pip install 'specdec[ray]'")
PROMPTS = [f"I would like to find a {kind} restaurant, a {kind} restaurant, a {kind}" for kind in ("cheap", "good")]


@pytest.fixture(scope="module")
def offline() -> LLM:
    return LLM(draft=None)


@pytest.fixture(scope="module")
def server(offline: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    from specdec.ray_serve.replicated_llm import replicated_here

    folder: Path = tmp_path_factory.mktemp("plugins")
    (folder / "bigrams.py").write_text(EXAMPLES["bigrams"])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        # Ray's processes are started with this one's environment.
        patch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")
        made = replicated_here(1, draft="ngram,bigrams", plugins=["bigrams"], draft_options=["bigrams=1"])
        with engine_in_thread(made, offline, RECOVERY) as engine, engine.again() as served:
            yield served


def test_its_source_drafts_and_no_token_differs(server: Served, offline: LLM) -> None:
    async def all_of_them(client: AsyncOpenAI) -> list[str]:
        return await asyncio.gather(*(stream(client, prompt, 24) for prompt in PROMPTS))

    assert run(server, all_of_them) == texts(offline, PROMPTS, 24)
    stats = server.call(server.llm.stats())
    assert stats.sources["bigrams"].tokens > 0
