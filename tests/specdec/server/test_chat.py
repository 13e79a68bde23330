"""`/v1/chat/completions` through OpenAI's package: answers are those of `LLM.chat`, whole and streamed."""

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI

from specdec import SamplingParams
from tests.specdec.server.running import Served

pytestmark = pytest.mark.slow

TALK: Any = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": [{"type": "text", "text": "A taxi"}, {"type": "text", "text": "to Davis."}]},
    {"role": "assistant", "content": None},
    {"role": "user", "content": "Now?", "name": "Ann"},
]
PLAIN = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "A taxi\nto Davis."},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "Now?"},
]
# What a client sends, and the sampling parameters that it stands for.
PARAMETERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"temperature": 0, "max_completion_tokens": 20}, {"temperature": 0, "max_tokens": 20}),
    "old name": ({"seed": 8, "max_tokens": 20}, {"seed": 8, "max_tokens": 20}),
    "both names": ({"seed": 8, "max_tokens": 9, "max_completion_tokens": 20}, {"seed": 8, "max_tokens": 20}),
    "stop": ({"seed": 8, "stop": "e", "max_tokens": 50}, {"seed": 8, "stop": "e", "max_tokens": 50}),
    "several": ({"seed": 8, "n": 3, "max_tokens": 20}, {"seed": 8, "n": 3, "max_tokens": 20}),
    "top_k": (
        {"seed": 8, "max_tokens": 20, "extra_body": {"top_k": 2}},
        {"seed": 8, "max_tokens": 20, "top_k": 2},
    ),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_answers_are_those_of_the_offline_api(server: Served, client: OpenAI, name: str) -> None:
    given, params = PARAMETERS[name]
    (expected,) = server.offline.chat(PLAIN, SamplingParams(**params), use_tqdm=False)
    whole = client.chat.completions.create(model="tiny", messages=TALK, **given)
    assert [choice.message.content for choice in whole.choices] == [output.text for output in expected.outputs]
    reasons = [output.finish_reason for output in expected.outputs]
    assert [choice.finish_reason for choice in whole.choices] == reasons
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert whole.usage.completion_tokens == sum(len(output.token_ids) for output in expected.outputs)
    parts = list(client.chat.completions.create(model="tiny", messages=TALK, stream=True, **given))
    for index, output in enumerate(expected.outputs):
        own = [choice for part in parts for choice in part.choices if choice.index == index]
        assert own[0].delta.role == "assistant"
        assert own[0].delta.content == ""
        assert all(choice.delta.role is None for choice in own[1:])
        assert "".join(choice.delta.content or "" for choice in own) == output.text
        assert own[-1].delta.content is None
        assert [choice.finish_reason for choice in own if choice.finish_reason] == [output.finish_reason]


@pytest.mark.long
def test_without_a_limit_an_answer_may_fill_the_context(server: Served, client: OpenAI) -> None:
    (expected,) = server.offline.chat(PLAIN, SamplingParams(seed=7, max_tokens=None), use_tqdm=False)
    reply = client.chat.completions.create(model="tiny", messages=TALK, seed=7)
    assert reply.choices[0].message.content == expected.text
    assert len(expected.token_ids) > 16


def test_logprobs_have_tokens_bytes_and_the_likeliest_others(server: Served, client: OpenAI) -> None:
    given: dict[str, Any] = {"model": "tiny", "messages": TALK, "seed": 3, "max_tokens": 10}
    params = SamplingParams(seed=3, max_tokens=10, logprobs=2)
    (expected,) = server.offline.chat(PLAIN, params, use_tqdm=False)
    whole = client.chat.completions.create(logprobs=True, top_logprobs=2, **given)
    stream = client.chat.completions.create(logprobs=True, top_logprobs=2, stream=True, **given)
    for choices in ([whole.choices[0]], [part.choices[0] for part in stream]):
        entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or ()]
        for entry, token, row in zip(entries, expected.token_ids, expected.outputs[0].logprobs or (), strict=True):
            assert entry.token == row[token].decoded_token
            assert entry.bytes == list(entry.token.encode())
            assert entry.logprob == row[token].logprob
            best = sorted(row.values(), key=lambda each: each.rank)[:2]
            assert [(top.token, top.logprob) for top in entry.top_logprobs] == [
                (each.decoded_token, each.logprob) for each in best
            ]
    (plain,) = client.chat.completions.create(logprobs=True, **given).choices
    assert plain.logprobs is not None
    assert [entry.top_logprobs for entry in plain.logprobs.content or ()] == [[]] * len(expected.token_ids)
    assert client.chat.completions.create(**given).choices[0].logprobs is None


def test_usage_comes_last_where_it_is_asked_for(client: OpenAI) -> None:
    options: Any = {"include_usage": True}
    *parts, last = client.chat.completions.create(
        model="tiny", messages=TALK, max_tokens=5, stream=True, stream_options=options, extra_body={"ignore_eos": True}
    )
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 5
    assert {part.usage for part in parts} == {None}
    # The same prompt again: its full blocks come from the prefix cache.
    usage = client.chat.completions.create(model="tiny", messages=TALK, max_tokens=5).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert 0 < (usage.prompt_tokens_details.cached_tokens or 0) < usage.prompt_tokens


def test_tokens_are_returned_on_demand(server: Served, client: OpenAI) -> None:
    given: dict[str, Any] = {"model": "tiny", "messages": TALK, "seed": 1, "max_tokens": 12}
    extra = {"return_token_ids": True}
    (expected,) = server.offline.chat(PLAIN, SamplingParams(seed=1, max_tokens=12), use_tqdm=False)
    whole: Any = client.chat.completions.create(extra_body=extra, **given)
    assert whole.prompt_token_ids == expected.prompt_token_ids
    assert whole.choices[0].token_ids == expected.token_ids
    parts: Any = client.chat.completions.create(extra_body=extra, stream=True, **given)
    parts = list(parts)
    found = [getattr(part.choices[0], "token_ids", None) or [] for part in parts]
    assert [token for part in found for token in part] == expected.token_ids
    assert parts[0].prompt_token_ids == expected.prompt_token_ids
    assert not any("prompt_token_ids" in part.model_fields_set for part in parts[1:])


def test_log_probabilities_of_the_prompt_come_with_the_first_part(client: OpenAI) -> None:
    given: Any = {"model": "tiny", "messages": TALK, "max_tokens": 3, "extra_body": {"prompt_logprobs": 1}}
    whole: Any = client.chat.completions.create(**given)
    first, *later = client.chat.completions.create(stream=True, **given)
    assert len(whole.prompt_logprobs) == whole.usage.prompt_tokens
    assert (first.model_extra or {})["prompt_logprobs"] == whole.prompt_logprobs
    assert not any("prompt_logprobs" in part.model_fields_set for part in later)


def test_the_last_message_may_be_continued(server: Served, client: OpenAI) -> None:
    """The template of the tiny model gets what requests send to it."""
    refused = {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}
    with pytest.raises(BadRequestError, match="may not hold 'chat_template'"):
        client.chat.completions.create(model="tiny", messages=TALK, extra_body=refused)
    # What has a field of its own would be overwritten by it.
    for name in ("add_generation_prompt", "continue_final_message", "tools"):
        body = {"messages": TALK, "chat_template_kwargs": {name: False}}
        for path in (*("/v1/chat/completions", "/tokenize"), *(["/v1/responses"] if name == "tools" else [])):
            own = {**body, "input": "a"} if path == "/v1/responses" else body
            status, _, reply = server.send("POST", path, own)
            assert (status, reply["error"]["param"]) == (400, "chat_template_kwargs")
            assert f"may not hold {name!r}; use the request's own fields" in reply["error"]["message"]
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    assert server.send("POST", "/tokenize", body)[2]["count"] == len("user: Hi\nassistant: ")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": []}, "messages"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages"),
    "top_logprobs": ({"top_logprobs": 2}, "top_logprobs"),
    "many logprobs": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "forced": ({"tool_choice": "required"}, "tool_choice"),
    "a name that is no text": ({"tools": [{"type": "function", "function": {"name": ["f"]}}]}, "tools"),
    "functions": ({"functions": [{"name": "f"}]}, "functions"),
    "temperature": ({"temperature": "hot"}, "temperature"),
    "n": ({"n": 2, "temperature": 0}, "n"),
    "effort": ({"reasoning_effort": "huge"}, "reasoning_effort"),
    "long": ({"messages": [{"role": "user", "content": "a" * 9000}]}, "messages"),
    "template": ({"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_fields_are_refused_by_name(client: OpenAI, name: str) -> None:
    given, field = REFUSED[name]
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": TALK, **given})
    assert caught.value.param == field


def test_plain_text_may_be_asked_for(client: OpenAI) -> None:
    reply = client.chat.completions.create(
        model="tiny", messages=TALK, max_tokens=2, response_format={"type": "text"}, user="me", store=False
    )
    assert reply.choices[0].message.content is not None


@pytest.mark.long
def test_the_asynchronous_client(server: Served) -> None:
    async def run() -> tuple[str | None, str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            given: dict[str, Any] = {"model": "tiny", "messages": TALK, "seed": 6, "max_tokens": 30}
            whole = await client.chat.completions.create(**given)
            parts = await client.chat.completions.create(stream=True, **given)
            text = "".join([part.choices[0].delta.content or "" async for part in parts])
            return whole.choices[0].message.content, text

    (expected,) = server.offline.chat(PLAIN, SamplingParams(seed=6, max_tokens=30), use_tqdm=False)
    assert asyncio.run(run()) == (expected.text, expected.text)
