"""A model that thinks, through OpenAI's client: thinking apart from answers and calls, whole and streamed."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from specdec import LLM
from specdec.async_engine.async_llm import AsyncLLM
from tests.specdec.server.running import Served, engine_in_thread
from tests.specdec.thinking_chain import CALLED, ENGINE, SERVER, TEXT, THOUGHT, save_thinking_chain

pytestmark = pytest.mark.slow

TALK: Any = [{"role": "user", "content": "hello"}]
TOOL: dict[str, Any] = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TOOLS: Any = [{"type": "function", "function": TOOL}]
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("thinking") / "target"
    save_thinking_chain(folder)
    # The whole chain is drafted from the second answer on.
    with (
        engine_in_thread(AsyncLLM(folder, "ngram", **ENGINE), LLM(folder, None, **ENGINE)) as engine,
        engine.again(**SERVER) as served,
    ):
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        client._strict_response_validation = True
        yield client


def chat(client: OpenAI, **given: Any) -> tuple[Any, Any]:
    """The message of an answer and its completion; the streamed one says the same."""
    extra = {"temperature": 0, **given.pop("extra_body", {})}
    given = {"model": "tiny", "messages": TALK, "extra_body": extra, **given}
    whole = client.chat.completions.create(**given)
    message = whole.choices[0].message
    parts = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **given))
    # The second finds more of its prompt in the cache.
    cached = {"prompt_tokens_details": whole.usage.prompt_tokens_details}
    assert parts[-1].usage.model_copy(update=cached) == whole.usage
    deltas = [choice.delta for part in parts for choice in part.choices]
    for name in ("reasoning", "reasoning_content"):
        said = [(delta.model_extra or {}).get(name) for delta in deltas]
        assert "".join(filter(None, said)) == (message.model_extra or {}).get(name, "")
    assert "".join(delta.content or "" for delta in deltas) == (message.content or "")
    calls = [call.function for delta in deltas for call in delta.tool_calls or ()]
    assert "".join(call.arguments or "" for call in calls) == "".join(
        call.function.arguments for call in message.tool_calls or ()
    )
    # Thinking comes first.
    kinds = [bool(delta.content or delta.tool_calls) for delta in deltas]
    thoughts = [place for place, delta in enumerate(deltas) if (delta.model_extra or {}).get("reasoning")]
    assert not thoughts or True not in kinds or thoughts[-1] < kinds.index(True)
    reasons = [choice.finish_reason for part in parts for choice in part.choices]
    assert reasons[-1] == whole.choices[0].finish_reason
    return message, whole


def test_thinking_is_apart_from_text_and_calls(client: OpenAI) -> None:
    message, whole = chat(client, tools=TOOLS)
    assert message.reasoning == message.reasoning_content == THOUGHT
    assert message.content == TEXT
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("f", CALLED)
    assert whole.choices[0].finish_reason == "tool_calls"
    assert whole.usage.completion_tokens_details.reasoning_tokens == 2


def test_no_effort_is_no_thinking(client: OpenAI) -> None:
    message, _ = chat(client, reasoning_effort="none", max_tokens=1)
    assert message.content == TEXT
    message, _ = chat(client, reasoning_effort="low", max_tokens=2)
    assert message.reasoning == " hello"
    # The template's own variable decides.
    on = {"chat_template_kwargs": {"enable_thinking": True}}
    message, _ = chat(client, reasoning_effort="none", max_tokens=2, extra_body=on)
    assert message.reasoning == " hello"
    given: Any = {"model": "tiny", "input": "hello", "max_output_tokens": 1, "temperature": 0}
    assert client.responses.create(reasoning={"effort": "none"}, **given).output_text == TEXT
    assert client.responses.create(reasoning={"effort": "low"}, **given).output_text == ""


def test_an_answer_that_is_cut_off_while_it_thinks_has_no_content(client: OpenAI) -> None:
    message, whole = chat(client, max_tokens=2)
    assert (message.reasoning, message.content) == (" hello", None)
    assert whole.choices[0].finish_reason == "length"


def test_thinking_is_switched_off_by_the_template(client: OpenAI) -> None:
    message, _ = chat(client, max_tokens=1, extra_body=OFF)
    assert (message.content, message.model_extra) == (TEXT, {})


def test_thinking_may_be_left_out(client: OpenAI) -> None:
    message, _ = chat(client, max_tokens=5, extra_body={"include_reasoning": False})
    assert (message.content, message.model_extra) == (TEXT, {})


def test_a_limit_ends_the_thinking_by_its_mark(client: OpenAI) -> None:
    """The model goes on as after its own mark."""
    for budget, thought in ((0, None), (1, " hello"), (2, THOUGHT), (9, THOUGHT), (-1, THOUGHT), (None, THOUGHT)):
        message, whole = chat(client, max_tokens=7, extra_body={"thinking_token_budget": budget})
        assert (message.model_extra or {}).get("reasoning") == thought
        assert message.content.startswith(TEXT)
        assert whole.usage.completion_tokens_details.reasoning_tokens == len((thought or "").split())


def test_forms_begin_behind_the_thinking(client: OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["true"]}}}
    message, _ = chat(client, response_format=form)
    assert (message.reasoning, message.content) == (THOUGHT, '"true"')
    message, _ = chat(client, response_format=form, extra_body={"thinking_token_budget": 1})
    assert (message.reasoning, message.content) == (" hello", '"true"')
    message, _ = chat(client, response_format=form, extra_body=OFF)
    assert (message.content, message.model_extra) == ('"true"', {})
    # A raw prompt shows by its marks, or its request says, whether it goes on with an answer.
    for prompt, more, text in (
        ("assistant<think>", {}, "hello trueb"),
        ("assistant<think></think>", {}, "b"),
        ("assistant", {"reasoning_ended": True}, "b"),
    ):
        extra = {"structured_outputs": {"choice": ["b"]}, "temperature": 0, **more}
        reply = client.completions.create(model="tiny", prompt=prompt, extra_body=extra)
        assert reply.choices[0].text.lstrip() == text


def test_what_continues_an_answer_is_no_thinking(client: OpenAI) -> None:
    """Unless the thinking has begun in it."""
    begun: Any = {"extra_body": {"continue_final_message": True, "add_generation_prompt": False}}
    for text, thinks in (("hello", False), ("<think> hello", True), ("<think>t</think>", False)):
        talk = [*TALK, {"role": "assistant", "content": text}]
        message, _ = chat(client, messages=talk, max_tokens=1, **begun)
        assert bool((message.model_extra or {}).get("reasoning")) == thinks
        assert bool(message.content) != thinks
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["true"]}}}
    talk = [*TALK, {"role": "assistant", "content": "hello"}]
    message, _ = chat(client, messages=talk, response_format=form, **begun)
    assert message.content == '"true"'


@pytest.mark.parametrize("shown", [True, False])
def test_log_probabilities_are_those_of_the_content(client: OpenAI, shown: bool) -> None:
    given: Any = {"model": "tiny", "messages": TALK, "max_tokens": 5, "logprobs": True}
    extra = {"temperature": 0, "include_reasoning": shown}
    (choice,) = client.chat.completions.create(**given, extra_body=extra).choices
    assert choice.logprobs is not None
    said = [each.token for each in choice.logprobs.content or ()]
    assert "".join(said) == choice.message.content == TEXT
    parts = client.chat.completions.create(**given, stream=True, extra_body=extra)
    told = [one.logprobs for part in parts for one in part.choices if one.logprobs is not None]
    assert [each.token for one in told for each in one.content or ()] == said


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_forced_calls_begin_behind_the_thinking(client: OpenAI, choice: Any) -> None:
    message, whole = chat(client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    assert (message.reasoning, message.content) == (THOUGHT, None)
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [("f", "{}")]
    assert whole.usage.completion_tokens_details.reasoning_tokens == 2


@pytest.mark.long
def test_a_response_has_an_item_of_reasoning(client: OpenAI) -> None:
    tools: Any = [{"type": "function", "strict": True, **TOOL}]
    given: dict[str, Any] = {"model": "tiny", "input": "hello", "tools": tools, "temperature": 0, "top_logprobs": 0}
    given["include"] = ["message.output_text.logprobs"]
    whole = client.responses.create(**given)
    thought, message, call = whole.output
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert [part.text for part in thought.content] == [THOUGHT]
    assert message.type == "message"
    assert whole.output_text == TEXT
    # The thinking has no log-probabilities.
    logprobs = message.content[0].logprobs  # type: ignore[union-attr]
    assert logprobs is not None
    assert logprobs[0].token == TEXT
    assert call.type == "function_call"
    assert json.loads(call.arguments) == CALLED
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens == 2
    events = list(client.responses.create(stream=True, **given))
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event.model_dump(), strict=True)
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    (done,) = [event.text for event in events if event.type == "response.reasoning_text.done"]
    assert "".join(deltas) == done == THOUGHT
    last = events[-1]
    assert last.type == "response.completed"
    assert [item.type for item in last.response.output] == ["reasoning", "message", "function_call"]
    with client.responses.stream(model="tiny", input="hello", temperature=0) as stream:
        assert stream.get_final_response().output_text.startswith(TEXT)
    off = client.responses.create(model="tiny", input="hello", max_output_tokens=1, temperature=0, extra_body=OFF)
    assert [item.type for item in off.output] == ["message"]


@pytest.mark.long
def test_earlier_thinking_goes_to_the_template(served: Served) -> None:
    """Which drops it or shows it."""
    talk = [*TALK, {"role": "assistant", "content": "a", "reasoning": "Hm, I see."}, *TALK]
    lengths = []
    for shown in (False, True):
        body = {"messages": talk, "chat_template_kwargs": {"show_thoughts": shown}}
        _, _, reply = served.send("POST", "/tokenize", body)
        lengths.append(reply["count"])
    assert lengths[0] < lengths[1]


@pytest.mark.long
def test_what_does_not_fit_is_refused(client: OpenAI, served: Served) -> None:
    with pytest.raises(BadRequestError, match="thinking_token_budget is -2; it must be 0 or more") as caught:
        chat(client, extra_body={"thinking_token_budget": -2})
    assert caught.value.param == "thinking_token_budget"
    for route, body in (("chat/completions", {"messages": TALK}), ("responses", {"input": "a"})):
        status, _, reply = served.send("POST", f"/v1/{route}", {**body, "chat_template_kwargs": {"messages": []}})
        assert (status, reply["error"]["param"]) == (400, "chat_template_kwargs")
