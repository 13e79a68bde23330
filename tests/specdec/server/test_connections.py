"""Clients that leave, that read slowly, and that come together."""

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
from openai import AsyncOpenAI

from specdec import SamplingParams
from tests.specdec.server.running import PATIENCE, Served

LONG = {"max_tokens": 8000, "ignore_eos": True, "n": 3}
CHAT = {**LONG, "messages": [{"role": "user", "content": "a"}]}


@contextmanager
def opened(server: Served, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A connection on which a request was sent."""
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        connection.sendall(head.encode() + text)
        yield connection


def wait_until_running(server: Served, count: int) -> None:
    while server.call(server.llm.stats()).running < count:
        pass


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**LONG, "prompt": "a"}),
        ("/v1/completions", {**LONG, "prompt": ["a", "b"]}),
        ("/v1/chat/completions", CHAT),
    ],
    ids=["completion", "several", "chat"],
)
def test_a_client_that_leaves_frees_its_blocks(server: Served, path: str, body: dict[str, Any], stream: bool) -> None:
    aborted = server.call(server.llm.stats()).aborted
    samples = 3 * (len(body["prompt"]) if "prompt" in body else 1)
    with opened(server, path, {**body, "stream": stream}) as connection:
        if stream:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
        wait_until_running(server, samples)
    server.wait_until_idle()
    assert server.call(server.llm.stats()).aborted == aborted + samples
    page = server.send("GET", "/metrics")[2].decode()
    (counted,) = re.findall(r'vllm:request_success_total{.*finished_reason="abort".*} (.*)', page)
    assert float(counted) >= samples


def test_a_client_that_never_reads_costs_nobody_else(server: Served) -> None:
    with opened(server, "/v1/completions", {**LONG, "prompt": "a", "stream": True, "logprobs": 20}):
        wait_until_running(server, 3)
        status, _, reply = server.send("POST", "/v1/completions", {"prompt": "b", "seed": 1})
        (expected,) = server.offline.generate("b", SamplingParams(seed=1), use_tqdm=False)
        assert (status, reply["choices"][0]["text"]) == (200, expected.text)
    server.wait_until_idle()


def draw(random: Random) -> dict[str, Any]:
    """Random parameters of a completion, by vLLM's names."""
    drawn = {
        "temperature": random.choice([0, 0.5, 1, 2]),
        "top_p": random.choice([1, 0.7]),
        "top_k": random.choice([0, 5]),
        "min_p": random.choice([0, 0.05]),
        "presence_penalty": random.choice([0, 1]),
        "repetition_penalty": random.choice([1, 1.3]),
        "max_tokens": random.randint(1, 40),
        "stop": random.choice([None, ["e"], ["ab", "q"]]),
        "ignore_eos": random.choice([False, True]),
        "seed": random.randrange(1000),
        "n": random.choice([1, 1, 2]),
    }
    if drawn["temperature"] == 0:
        drawn["n"] = 1
    return drawn


def test_many_streams_with_random_parameters(server: Served) -> None:
    """Among clients that leave and requests that are refused, every other one gets the tokens of the offline API."""
    random = Random(0)
    requests = [(draw(random), "".join(random.choices("abcdefgh ", k=random.randint(1, 40)))) for _ in range(60)]
    expected = server.offline.generate(
        [prompt for _, prompt in requests], [SamplingParams(**params) for params, _ in requests], use_tqdm=False
    )

    async def texts(client: AsyncOpenAI, number: int) -> list[str] | None:
        params, prompt = requests[number]
        extra = {**params, **({"top_k": "x"} if number % 6 == 1 else {})}
        body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "extra_body": extra}
        try:
            if number % 6 == 2:
                return [choice.text for choice in (await client.completions.create(**body)).choices]
            stream = await client.completions.create(stream=True, **body)
        except Exception:
            return None
        found = [""] * params["n"]
        async for part in stream:
            found[part.choices[0].index] += part.choices[0].text
            if number % 6 == 0:
                await stream.close()
                return None
        return found

    async def run() -> list[list[str] | None]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(texts(client, number) for number in range(len(requests))))

    for number, found in enumerate(asyncio.run(run())):
        if number % 6 > 1:
            assert found == [output.text for output in expected[number].outputs], requests[number]
        else:
            assert found is None
    server.wait_until_idle()
