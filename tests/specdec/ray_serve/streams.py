"""Streamed answers of a server over Ray's replicas, and what they must be."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from openai import AsyncOpenAI

from specdec import LLM, SamplingParams

# Seconds in which Ray Serve starts two replicas, or a new one in place of a dead one.
RECOVERY = 300
T = TypeVar("T")


async def stream(
    client: AsyncOpenAI, prompt: str, max_tokens: int, begun: list[str] | None = None, model: str = "tiny"
) -> str:
    """Return the text of a streamed answer; an error event raises `APIError`."""
    parts = await client.completions.create(
        model=model, prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    text = ""
    async for part in parts:
        if not text and begun is not None:
            begun.append(prompt)
        text += part.choices[0].text
    return text


class Server(Protocol):
    @property
    def url(self) -> str: ...


def run(server: Server, work: Callable[[AsyncOpenAI], Coroutine[Any, Any, T]]) -> T:
    async def connected() -> T:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await work(client)

    return asyncio.run(connected())


def texts(offline: LLM, prompts: list[str], max_tokens: int) -> list[str]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return [output.text for output in offline.generate(prompts, params)]


def actor(deployment: str) -> Any:
    """Return the actor of a replica of this deployment."""
    import ray

    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
    return ray.get_actor(next(name for name in names if f"#{deployment}#" in name), "serve")
