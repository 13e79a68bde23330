"""The engine in Ray Serve LLM. Not a part of CI: it needs Ray, and the types of requests of vLLM or SGLang."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai import AsyncOpenAI, BadRequestError

from specdec import LLM
from tests.specdec.ray_serve.streams import stream, texts

pytest.importorskip("ray", reason="the package ray is not installed: pip install 'specdec[ray]'")
types = pytest.importorskip("ray.serve.llm", exc_type=ImportError, reason="vLLM or SGLang is not installed")

FILE = Path(__file__).parents[3] / "docker" / "ray_llm.yaml"
PROMPTS = [f"I would like to find a {kind} restaurant in the centre" for kind in ("cheap", "good", "new", "quiet")]


def config(**arguments: Any) -> Any:
    return types.LLMConfig(model_loading_config={"model_id": "demo"}, engine_kwargs={"max_num_seqs": 4, **arguments})


@asynccontextmanager
async def started() -> AsyncIterator[Any]:
    from specdec.ray_serve.llm_server import SpecdecServer

    server = SpecdecServer.sync_init(config(server={"tool_call_parser": "none"}))
    await server.start()
    yield server
    await server.engine.shutdown()


def on_a_server(work: Callable[[Any], Awaitable[None]]) -> None:
    async def run() -> None:
        async with started() as server:
            await work(server)

    asyncio.run(run())


@pytest.fixture(scope="module")
def offline() -> LLM:
    return LLM()


def test_answers_of_all_kinds(offline: LLM) -> None:
    """Whole and streamed ones, refusals, tokens, and the end of the engine."""
    from ray.llm._internal.serve.core.configs import openai_api_models as models

    (expected,) = texts(offline, PROMPTS[:1], 8)
    fields = {"model": "demo", "max_tokens": 8, "temperature": 0.0, "ignore_eos": True}

    async def answers(asked: Any) -> list[Any]:
        return [answer async for answer in await asked]

    async def work(server: Any) -> None:
        await server.check_health()
        (whole,) = await answers(server.completions(models.CompletionRequest(prompt=PROMPTS[0], **fields)))
        assert isinstance(whole, models.CompletionResponse)
        assert whole.choices[0].text == expected
        batches = await answers(server.completions(models.CompletionRequest(prompt=PROMPTS[0], stream=True, **fields)))
        events = "".join(event for batch in batches for event in batch).split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert len(events) > 3
        chat = {"messages": [{"role": "user", "content": "Hello"}], **fields}
        (reply,) = await answers(server.chat(models.ChatCompletionRequest(**chat)))
        assert isinstance(reply, models.ChatCompletionResponse)
        assert reply.choices[0].message.content
        (refusal,) = await answers(server.chat(models.ChatCompletionRequest(**{**chat, "top_p": 7.0})))
        assert isinstance(refusal, models.ErrorResponse)
        assert refusal.error.code == 400
        assert "top_p" in refusal.error.message
        (refusal,) = [each async for each in server.engine.embeddings(None)]
        assert refusal.error.code == 404

    on_a_server(work)


def test_settings_that_are_refused() -> None:
    from specdec.ray_serve.llm_engine import SpecdecEngine

    for arguments, message in (
        ({"server": {"api_keys": ["x"]}}, "ServerSettings has no 'api_keys'; the nearest it has is 'api_key'"),
        ({"server": {"api_key": ["x"]}}, "server has api_key; Ray Serve's ingress takes the requests"),
        ({"server": {"lora_modules": ["x=/x"]}}, "server has lora_modules; Ray Serve LLM names no adapters"),
        ({"max_num_seq": 4}, "max_num_seq"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            SpecdecEngine(config(**arguments))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The application of the configuration file, on a cluster of this machine."""
    import ray
    from ray import serve

    (application,) = yaml.safe_load(FILE.read_text())["applications"]
    assert application["import_path"] == "ray.serve.llm:build_openai_app"
    (model,) = application["args"]["llm_configs"]
    model["deployment_config"]["autoscaling_config"]["max_replicas"] = 1
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": 18017})
        serve.run(types.build_openai_app(application["args"]), name=application["name"])
        yield "http://127.0.0.1:18017/v1"
    finally:
        serve.shutdown()
        ray.shutdown()


def test_the_openai_client_over_rays_ingress(url: str, offline: LLM) -> None:
    async def run() -> list[str]:
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            assert [each.id for each in (await client.models.list()).data] == ["demo"]
            with pytest.raises(BadRequestError, match="top_p"):
                await client.completions.create(model="demo", prompt="x", top_p=7.0)
            return await asyncio.gather(*(stream(client, prompt, 16, model="demo") for prompt in PROMPTS))

    assert asyncio.run(run()) == texts(offline, PROMPTS, 16)
