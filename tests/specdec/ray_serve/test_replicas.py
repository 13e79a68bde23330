"""Two replicas on Ray Serve, on this machine. Not a part of CI: starting Ray takes longer than all of these."""

import asyncio
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from openai import APIError, AsyncOpenAI

from specdec import LLM
from specdec.async_engine.messages import decode_reply_to, encode_command
from specdec.core.commands import GetStats, Stats
from tests.specdec.ray_serve.streams import RECOVERY, actor, run, stream, texts
from tests.specdec.server.running import Served, engine_in_thread

ray = pytest.importorskip("ray", reason="the package ray is not installed: pip install 'specdec[ray]'")

BEGINNINGS = ["I would like to find", "Can you tell me about a", "I need a train to", "What is the address of the"]


@pytest.fixture(scope="module")
def offline() -> LLM:
    return LLM()


@pytest.fixture(scope="module")
def server(offline: LLM) -> Iterator[Served]:
    from specdec.ray_serve.replicated_llm import replicated_here

    with engine_in_thread(replicated_here(2), offline, RECOVERY) as engine, engine.again() as served:
        yield served


def queued(server: Served) -> list[int]:
    """Return how many requests each running replica has had, least first."""
    connection: Any = server.llm._connection
    answers = [
        decode_reply_to(data).reply() for data in server.call(connection._replicas.ask(encode_command(GetStats())))
    ]
    return sorted(answer.stats.queued for answer in answers if isinstance(answer, Stats))


def test_64_streams_have_the_tokens_of_one_engine(server: Served, offline: LLM) -> None:
    prompts = [f"{BEGINNINGS[index % 4]} {index}" for index in range(64)]

    async def all_of_them(client: AsyncOpenAI) -> list[str]:
        return await asyncio.gather(*(stream(client, prompt, 24) for prompt in prompts))

    assert run(server, all_of_them) == texts(offline, prompts, 24)
    assert queued(server) == [32, 32]
    server.wait_until_idle()


def test_a_shared_prefix_stays_on_one_replica_unless_it_is_overloaded(server: Served) -> None:
    prefix = "The museum of the city is open from nine to five and the entrance is free on the first day. " * 4

    def after(count: int) -> list[int]:
        """Return how many of so many requests at once each replica got, least first."""

        async def all_of_them(client: AsyncOpenAI) -> list[str]:
            return await asyncio.gather(*(stream(client, f"{prefix} {index}", 16) for index in range(count)))

        before = queued(server)
        run(server, all_of_them)
        return sorted(new - old for old, new in zip(before, queued(server), strict=True))

    assert after(1) == [0, 1]
    assert after(8) == [0, 8]
    few, many = after(48)
    assert few + many == 48
    assert few >= 16
    server.wait_until_idle()


def test_a_killed_replica_fails_its_streams_and_comes_back(server: Served, offline: LLM) -> None:
    prompts = [f"{BEGINNINGS[index % 4]} {index}" for index in range(16)]

    async def kill_one(client: AsyncOpenAI) -> tuple[list[str | BaseException], str]:
        begun: list[str] = []
        tasks = [asyncio.create_task(stream(client, prompt, 400, begun)) for prompt in prompts]
        while len(begun) < 16:
            await asyncio.sleep(0.01)
        ray.kill(actor("engine"))
        new = await stream(client, "I need a taxi", 24)
        return await asyncio.gather(*tasks, return_exceptions=True), new

    found, new = run(server, kill_one)
    failed = [error for error in found if isinstance(error, BaseException)]
    # Requests were spread evenly.
    assert len(failed) == 8
    assert all(isinstance(error, APIError) for error in failed)
    assert all(re.fullmatch(r"replica \w+ failed: The actor died .*; try again", str(error)) for error in failed)
    for text, expected in zip(found, texts(offline, prompts, 400), strict=True):
        assert isinstance(text, APIError) or text == expected
    assert [new] == texts(offline, ["I need a taxi"], 24)

    end = time.monotonic() + RECOVERY
    while len(queued(server)) < 2:
        assert time.monotonic() < end
        time.sleep(0.1)

    async def all_of_them(client: AsyncOpenAI) -> list[str]:
        return await asyncio.gather(*(stream(client, prompt, 8) for prompt in prompts))

    run(server, all_of_them)
    # The new one has had no others.
    assert queued(server)[0] == 8
    server.wait_until_idle()
