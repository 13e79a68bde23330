"""Adapters of an `AsyncLLM`: loaded by a request or ahead of it, and again after the engine process has died."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from specdec import LLM, QueueFullError, SamplingParams
from tests.lora_adapters import request_for, save_adapter
from tests.specdec.async_engine.served import LIMIT, SETTINGS, Served
from tests.specdec.world import World

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.mark.long
def test_requests_have_adapters(world: World, tmp_path: Path) -> None:
    """One engine for all of it, since starting one takes seconds."""
    third = request_for(save_adapter(tmp_path / "third", world.target, seed=7), 3)
    first, second = (world.adapter(number) for number in (1, 2))
    assert first is not None
    settings: dict[str, Any] = {**SETTINGS, "enable_lora": True, "max_loras": 2, "max_lora_rank": 17}
    offline = LLM(world.folder / "target", None, **settings)
    expected = [
        offline.generate([[5, 6]], GREEDY, lora_request=each, use_tqdm=False)[0].token_ids
        for each in (first, second, None)
    ]

    async def tokens(lora_request: Any, params: SamplingParams = GREEDY) -> list[int]:
        states = [state async for state in served.llm.generate([5, 6], params, lora_request=lora_request)]
        return states[-1].token_ids

    async def run() -> None:
        llm = served.llm
        assert await asyncio.gather(*map(tokens, (first, second, None))) == expected
        with pytest.raises(ValueError, match="it must be a LoRARequest"):
            await tokens("first")
        with pytest.raises(ValueError, match="no such folder"):
            await llm.add_lora(request_for(tmp_path / "nowhere", 4))
        running = [asyncio.create_task(tokens(each, LONG)) for each in (first, second)]
        while (await llm.stats()).running != 2:
            await asyncio.sleep(0.01)
        with pytest.raises(QueueFullError, match="max_loras 2"):
            await llm.add_lora(third)
        with pytest.raises(QueueFullError, match="max_loras 2"):
            await tokens(third)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        while (await llm.stats()).running:
            await asyncio.sleep(0.01)
        await llm.add_lora(third)
        assert await llm.remove_lora(3)
        assert not await llm.remove_lora(3)
        assert llm.engine_pid is not None
        os.kill(llm.engine_pid, signal.SIGKILL)
        async with asyncio.timeout(LIMIT):
            while llm.healthy:
                await asyncio.sleep(0.01)
            while not llm.healthy:
                await asyncio.sleep(0.01)
        assert await tokens(first) == expected[0]

    with Served(world.folder, **settings) as served:
        served.run(run())
