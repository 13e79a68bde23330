"""A prefill and a decode replica on Ray Serve, on this machine. Not a part of CI: starting Ray takes too long."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from specdec import LLM
from specdec.async_engine.messages import decode_reply_to, encode_command
from specdec.core.commands import GetStats, Stats
from specdec.core.engine_stats import EngineStats
from tests.specdec.kv_transfer.engines import disk
from tests.specdec.kv_transfer.mooncake import mooncake_master, needs_mooncake
from tests.specdec.ray_serve.streams import RECOVERY, actor, run, stream, texts
from tests.specdec.server.running import Served, engine_in_thread

ray = pytest.importorskip("ray", reason="the package ray is not installed: pip install 'specdec[ray]'")

BEGINNINGS = [f"{place} I would like to find a cheap restaurant in the centre. " * 6 for place in ("Here", "There")]


@pytest.fixture(scope="module")
def offline() -> LLM:
    return LLM()


@contextmanager
def store(kind: str, folder: Path) -> Iterator[dict[str, Any]]:
    """The `kv_transfer_config` of a store that replicas share."""
    if kind == "disk":
        yield disk(folder, host_bytes=256 << 20)
        return
    with mooncake_master(folder) as master:
        yield master.config(cpu_bytes_to_use=256 << 20, global_segment_size=256 << 20)


@pytest.fixture(scope="module", params=["disk", pytest.param("mooncake", marks=needs_mooncake)])
def server(offline: LLM, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Served]:
    from specdec.ray_serve.replicated_llm import replicated_here

    with store(request.param, tmp_path_factory.mktemp("blocks")) as config:
        llm = replicated_here(1, num_prefill=1, kv_transfer_config=config)
        with engine_in_thread(llm, offline, RECOVERY) as engine, engine.again() as served:
            yield served


def stats(server: Served, deployment: str) -> EngineStats:
    """Return the counts of the only replica of a deployment."""
    connection: Any = server.llm._connection
    replicas = {"engine": connection._replicas, "prefill": connection._replicas.prefill}[deployment]
    (answer,) = [decode_reply_to(data).reply() for data in server.call(replicas.ask(encode_command(GetStats())))]
    assert isinstance(answer, Stats)
    return answer.stats


def test_streams_have_the_tokens_of_one_engine(server: Served, offline: LLM) -> None:
    """With the prefill replica, and without it after its death."""
    prompts = [f"{BEGINNINGS[index % 2]} Number {index}" for index in range(8)]

    async def all_of_them(client: AsyncOpenAI) -> list[str]:
        return await asyncio.gather(*(stream(client, prompt, 24) for prompt in prompts))

    expected = texts(offline, prompts, 24)
    assert run(server, all_of_them) == expected
    first, second = stats(server, "prefill"), stats(server, "engine")
    assert (first.finished, first.generated_tokens) == (8, 8)
    assert (second.finished, second.generated_tokens) == (8, 8 * 24)
    block = offline.engine.worker.cache.block_size
    shortest = min(len(offline.tokenizer.encode(prompt)) for prompt in prompts) if offline.tokenizer else 0
    # What the prompts share is found on the device by all but the first; the rest is loaded.
    assert second.prefix_hits + second.external_prefix_hits >= 8 * (shortest // block - 1) * block
    assert second.external_prefix_hits >= shortest // block * block

    ray.kill(actor("prefill"))
    assert run(server, all_of_them) == expected
    server.wait_until_idle()
