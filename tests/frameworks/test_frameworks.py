"""Frameworks that force tool calls by default, unmodified, against `specdec serve`; `.ci/frameworks` runs them."""

import asyncio
import os
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

URL = os.environ.get("SPECDEC_URL")
pytestmark = pytest.mark.skipif(URL is None, reason="needs SPECDEC_URL, the address of a server; run .ci/frameworks")
MODEL, KEY = "tiny", "none"
TEXT = "Book a table for two at Nora's."


class Booking(BaseModel):
    """A table at a restaurant."""

    name: str = Field(max_length=8, description="Who books.")
    guests: int = Field(ge=1, le=12)
    table: Literal["inside", "outside"]
    wish: Literal["window", "quiet"] | None = None


def test_instructor_by_default() -> None:
    instructor = pytest.importorskip("instructor")
    from openai import OpenAI

    client = instructor.from_openai(OpenAI(base_url=URL, api_key=KEY))
    messages = [{"role": "user", "content": TEXT}]
    # A wrong answer would be asked for again.
    found = client.chat.completions.create(model=MODEL, messages=messages, response_model=Booking, max_retries=0)
    assert isinstance(found, Booking)
    parts = list(client.chat.completions.create_partial(model=MODEL, messages=messages, response_model=Booking))
    assert Booking.model_validate(parts[-1].model_dump())


def test_pydantic_ai_by_default() -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=URL, api_key=KEY)
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        agent = pydantic_ai.Agent(kind(MODEL, provider=provider), output_type=Booking, retries=0)
        assert isinstance(agent.run_sync(TEXT).output, Booking)

        async def streamed(agent: Any = agent) -> Any:
            async with agent.run_stream(TEXT) as result:
                return await result.get_output()

        assert isinstance(asyncio.run(streamed()), Booking)


def test_langchain_with_function_calling() -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    chat = langchain_openai.ChatOpenAI(base_url=URL, api_key=KEY, model=MODEL)
    forced = chat.with_structured_output(Booking, method="function_calling")
    assert isinstance(forced.invoke(TEXT), Booking)
    assert isinstance(list(forced.stream(TEXT))[-1], Booking)
    reply = chat.bind_tools([Booking], tool_choice="any").invoke(TEXT)
    assert reply.tool_calls
    assert all(Booking.model_validate(call["args"]) for call in reply.tool_calls)


def test_llama_index_structured_predict() -> None:
    pytest.importorskip("llama_index.llms.openai_like")
    from llama_index.core.prompts import PromptTemplate
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model=MODEL, api_base=URL, api_key=KEY, is_chat_model=True, is_function_calling_model=True, max_retries=0
    )
    prompt = PromptTemplate("Book: {text}")
    assert isinstance(llm.structured_predict(Booking, prompt, text=TEXT), Booking)
    assert isinstance(asyncio.run(llm.astructured_predict(Booking, prompt, text=TEXT)), Booking)
