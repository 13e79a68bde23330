"""Structured outputs through OpenAI's package: three routes, streamed and not, and errors."""

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
from jsonschema import validate
from openai import APITimeoutError, AsyncOpenAI, BadRequestError, OpenAI
from pydantic import BaseModel, Field

from specdec import SamplingParams, StructuredOutputsParams
from tests.specdec.server.running import Served

pytestmark = pytest.mark.slow

TALK: list[Any] = [{"role": "user", "content": "Book a table."}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "guests": {"type": "integer", "minimum": 1, "maximum": 12},
        "wishes": {"type": "array", "items": {"enum": ["window", "quiet"]}, "maxItems": 2},
    },
    "required": ["name", "guests", "wishes"],
    "additionalProperties": False,
}
FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "booking", "strict": True, "schema": SCHEMA}}


class Booking(BaseModel):
    name: str = Field(max_length=6)
    table: Literal["inside", "outside"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chat_follows_a_schema_as_the_offline_api_does(server: Served, client: OpenAI, temperature: float) -> None:
    given: dict[str, Any] = {"model": "tiny", "messages": TALK, "temperature": temperature, "seed": 3}
    reply = client.chat.completions.create(response_format=FORMAT, **given)  # type: ignore[call-overload]
    text = reply.choices[0].message.content
    validate(json.loads(text), SCHEMA)
    assert reply.choices[0].finish_reason == "stop"
    form = StructuredOutputsParams(json=SCHEMA)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=None, structured_outputs=form)
    assert server.offline.chat(TALK, params, use_tqdm=False)[0].text == text
    parts: Any = client.chat.completions.create(response_format=FORMAT, stream=True, **given)  # type: ignore[call-overload]
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text
    # vLLM's spelling.
    extra = {"structured_outputs": {"json": SCHEMA}}
    again = client.chat.completions.create(extra_body=extra, **given)
    assert again.choices[0].message.content == text


def test_whole_numbers_may_be_larger_than_floats(server: Served) -> None:
    schema = {"type": "object", "properties": {"n": {"const": 7, "maximum": 10**320}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    calls = {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
        "tool_choice": "required",
    }
    for given in ({"response_format": form}, {"structured_outputs": {"json": schema}}, calls):
        body = json.dumps({"messages": TALK, "seed": 1, "parallel_tool_calls": False, **given}).encode()
        status, _, reply = server.send("POST", "/v1/chat/completions", body)
        assert status == 200, reply
        message = reply["choices"][0]["message"]
        text = message["tool_calls"][0]["function"]["arguments"] if given is calls else message["content"]
        assert text == '{"n": 7}'


def test_types_of_pydantic_come_back_parsed(client: OpenAI) -> None:
    reply = client.chat.completions.parse(model="tiny", messages=TALK, seed=1, response_format=Booking)
    assert isinstance(reply.choices[0].message.parsed, Booking)
    answer = client.responses.parse(model="tiny", input="Book a table.", text_format=Booking, extra_body={"seed": 2})
    assert isinstance(answer.output_parsed, Booking)


def test_any_object(client: OpenAI) -> None:
    """Keys and values are of any length, so the text is closed by its first key."""
    reply = client.chat.completions.create(
        model="tiny",
        messages=TALK,
        response_format={"type": "json_object"},
        logit_bias={"95": 100},
        max_tokens=9,
        seed=1,
    )
    assert reply.choices[0].message.content is not None
    assert reply.choices[0].message.content.startswith("{")


def test_responses_follow_a_schema_and_repeat_it(client: OpenAI) -> None:
    form: Any = {"type": "json_schema", "name": "booking", "schema": SCHEMA, "strict": True}
    reply = client.responses.create(model="tiny", input="Book.", text={"format": form}, extra_body={"seed": 5})
    validate(json.loads(reply.output_text), SCHEMA)
    assert reply.text is not None
    assert reply.text.format is not None
    assert reply.text.format.type == "json_schema"


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[ab]{3}-[0-9]"}, "[ab]{3}-[0-9]"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'root ::= "x" | "(" root ")"'}, r"\(*x\)*"),
    ],
)
def test_completions_follow_every_form(client: OpenAI, form: dict[str, Any], pattern: str) -> None:
    extra = {"structured_outputs": form}
    reply = client.completions.create(model="tiny", prompt=["a", "b"], n=2, seed=4, max_tokens=90, extra_body=extra)
    assert len(reply.choices) == 4
    assert all(re.fullmatch(pattern, choice.text) for choice in reply.choices)


def test_forms_and_free_text_side_by_side(server: Served) -> None:
    async def run() -> list[Any]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            forms: list[Any] = [FORMAT, {"type": "text"}] * 2
            return await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model="tiny", messages=TALK, response_format=form, seed=seed, max_tokens=90
                    )
                    for seed, form in enumerate(forms)
                )
            )

    for place, reply in enumerate(asyncio.run(run())):
        if place % 2 == 0:
            validate(json.loads(reply.choices[0].message.content), SCHEMA)
    server.wait_until_idle()


def test_an_object_may_have_a_schema(client: OpenAI) -> None:
    """As in llama.cpp."""
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}
    form: Any = {"type": "json_object", "schema": schema}
    reply = client.chat.completions.create(model="tiny", messages=TALK, response_format=form)
    assert json.loads(reply.choices[0].message.content or "") == {"a": 7}


def response_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format", "give its name and its schema"),
    "no name": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format",
        "give its name and its schema",
    ),
    "type": (response_format({"type": "strng"}), "response_format", "type is 'strng'; it must be a JSON type"),
    "keyword": (response_format({"not": {}}), "response_format", "'not' is not supported; leave it out"),
    "reference": (response_format({"$ref": "#/a"}), "response_format", "$ref is '#/a', which is not there"),
    "tag": ({"response_format": {"type": "structural_tag"}}, "response_format", "supported are 'text', 'json_object'"),
    "regex": ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "'(a': unclosed group"),
    "grammar": ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs", "cannot be followed"),
    "two": ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "give exactly one"),
    "none": ({"structured_outputs": {}}, "structured_outputs", "give exactly one"),
    "unknown": (
        {"structured_outputs": {"regexp": "a"}},
        "structured_outputs",
        "holds 'regexp'; it may hold json, regex",
    ),
    "both": (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "exclude each other; leave one out",
    ),
    "older": ({"guided_regex": "a"}, "guided_regex", "use structured_outputs with 'regex'"),
    "no text": ({"structured_outputs": {"choice": ["ü"]}}, "structured_outputs", "no text follows it"),
    "impossible": (
        {"structured_outputs": {"choice": ["a"]}, "bad_words": ["a"]},
        "None",
        "no token can follow",
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_forms_are_refused_by_name(client: OpenAI, name: str, stream: bool) -> None:
    given, field, message = REFUSED[name]
    with pytest.raises(BadRequestError, match=re.escape(message)) as caught:
        client.chat.completions.create(model="tiny", messages=TALK, stream=stream, extra_body=given)
    assert str(caught.value.param) == field
    assert "\n" not in caught.value.message
    assert field != "response_format" or "structured_outputs" not in caught.value.message


def test_responses_name_their_own_field(client: OpenAI) -> None:
    for form, message in (
        ({"type": "json_schema", "name": "x"}, "give its name and its schema"),
        ({"type": "json_schema", "name": "x", "schema": {"type": "strng"}}, "type is 'strng'; it must be a JSON type"),
    ):
        with pytest.raises(BadRequestError, match=rf"text\.format(:| is) .*{message}") as caught:
            client.responses.create(model="tiny", input="a", extra_body={"text": {"format": form}})
        assert caught.value.param == "text.format"


def test_a_form_that_is_too_large_is_refused_with_its_limit(client: OpenAI) -> None:
    choice = [f"choice number {i}" for i in range(15_000)]
    with pytest.raises(BadRequestError, match="more than structured_max_bytes, 262144; make it smaller") as caught:
        client.completions.create(model="tiny", prompt="a", extra_body={"structured_outputs": {"choice": choice}})
    assert caught.value.param == "structured_outputs"


def test_a_form_without_end_ends_with_its_client(server: Served, client: OpenAI) -> None:
    """Its compilation takes half a minute. Another client's forms are answered meanwhile."""
    endless = {"grammar": 'start: %json {"type": "integer", "multipleOf": 700001}'}

    def ask(form: dict[str, Any], seconds: float = 60.0) -> Any:
        patient = client.with_options(timeout=seconds, max_retries=0)
        return patient.completions.create(
            model="tiny", prompt="a", max_tokens=9, extra_body={"structured_outputs": form}
        )

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(ask, endless, 3.0)
        assert re.fullmatch("[ab]{7}", ask({"regex": "[ab]{7}"}).choices[0].text)
        with pytest.raises(APITimeoutError):
            waiting.result()
    server.wait_until_idle()
