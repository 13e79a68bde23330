"""An `AsyncLLM` on an event loop of its own, for tests that are plain functions."""

import asyncio
import json
import os
import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar

from specdec import AsyncLLM, DraftShape, RequestOutput, SamplingParams
from tests.specdec.world import World

T = TypeVar("T")
# Quick to start: nothing is measured.
SETTINGS: dict[str, Any] = {
    "dtype": "float64",
    "shape": DraftShape(3, 2, 6),
    "adaptive_drafts": False,
    "prefill_stretch": 0,
    "max_num_seqs": 16,
    "kv_cache_memory": 1 << 24,
    "scheduling_policy": "priority",
}
# Long enough that it runs until a test ends it.
ENDLESS = SamplingParams(temperature=0, max_tokens=8000, ignore_eos=True)
SHORT = SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True)
LIMIT = 300.0


class Served:
    """A started engine; `run` runs a coroutine beside it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self._runner = asyncio.Runner()
        self.llm = AsyncLLM(folder / "target", folder / "head", **{**SETTINGS, **settings})
        self.run(self.llm.start())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        async def limited() -> T:
            async with asyncio.timeout(LIMIT):
                return await work

        return self._runner.run(limited())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self.llm.close())
        self._runner.close()


def long_world(world: World, folder: Path) -> Path:
    """Copy a world whose target takes long outputs, and return its folder."""
    shutil.copytree(world.folder, folder, dirs_exist_ok=True)
    file = folder / "target" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": 10_000}))
    return folder


async def states_of(llm: AsyncLLM, prompt: Any, params: SamplingParams, **more: Any) -> list[RequestOutput]:
    """Return all states of a request."""
    return [state async for state in llm.generate(prompt, params, **more)]


async def assert_idle(llm: AsyncLLM) -> None:
    """Nothing runs and nothing is held, at the latest when the running step has ended."""
    while (await llm.stats()).running or (await llm.stats()).waiting:
        await asyncio.sleep(0.01)
    assert await llm.check_integrity() == (0, 0)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        pass
    if Path("/proc/self").exists():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
