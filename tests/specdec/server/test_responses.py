"""`/v1/responses` through OpenAI's package, whole and streamed."""

from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from specdec import SamplingParams
from tests.specdec.server.running import Served

pytestmark = pytest.mark.slow

TALK: Any = [
    {"role": "developer", "content": "Be terse."},
    {"role": "user", "content": [{"type": "input_text", "text": "A taxi"}]},
    {"type": "reasoning", "id": "r1", "summary": [{"type": "summary_text", "text": "Call."}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
    {"type": "function_call", "call_id": "c1", "name": "taxi", "arguments": '{"to": "Davis"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "none free"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "None."}]},
    {"role": "user", "content": "Now?"},
]
PLAIN = [
    {"role": "system", "content": "Answer."},
    {"role": "system", "content": "Be terse."},
    {"role": "user", "content": "A taxi"},
    {"role": "assistant", "content": "I look."},
    {"role": "tool", "content": "none free"},
    {"role": "assistant", "content": "None."},
    {"role": "user", "content": "Now?"},
]
GIVEN: dict[str, Any] = {"model": "tiny", "input": TALK, "instructions": "Answer."}
PARAMETERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"temperature": 0, "max_output_tokens": 20}, {"temperature": 0, "max_tokens": 20}),
    "top_p": (
        {"top_p": 0.6, "max_output_tokens": 30, "extra_body": {"seed": 4}},
        {"top_p": 0.6, "max_tokens": 30, "seed": 4},
    ),
    "to the end": ({"extra_body": {"seed": 3}}, {"max_tokens": None, "seed": 3}),
    "stop": (
        {"extra_body": {"seed": 3, "stop": ["a", "e"], "top_k": 50}},
        {"max_tokens": None, "seed": 3, "stop": ["a", "e"], "top_k": 50},
    ),
}
STATUS = {"stop": "completed", "length": "incomplete"}


@pytest.mark.long
@pytest.mark.parametrize("name", PARAMETERS)
def test_answers_are_those_of_the_offline_api(server: Served, client: OpenAI, name: str) -> None:
    given, params = PARAMETERS[name]
    (expected,) = server.offline.chat(PLAIN, SamplingParams(**params), use_tqdm=False)
    assert expected.finish_reason is not None
    whole = client.responses.create(**GIVEN, **given)
    assert whole.output_text == expected.text
    assert whole.status == STATUS[expected.finish_reason]
    assert whole.usage is not None
    assert whole.usage.input_tokens == len(expected.prompt_token_ids)
    assert whole.usage.output_tokens == len(expected.token_ids)
    assert (whole.incomplete_details is not None) == (expected.finish_reason == "length")
    events = list(client.responses.create(stream=True, **GIVEN, **given))
    _check_events(events, whole)


def _check_events(events: list[Any], whole: Response) -> None:
    """Check the order and the sums of the events of one message."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event.model_dump(), strict=True)
    kinds = [event.type.removeprefix("response.") for event in events]
    begin = ["created", "in_progress", "output_item.added", "content_part.added"]
    end = ["output_text.done", "content_part.done", "output_item.done", whole.status]
    middle = ["output_text.delta"] * (len(events) - len(begin) - len(end))
    assert kinds == [*begin, *middle, *end]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-4].text == events[-3].part.text == events[-2].item.content[0].text == whole.output_text
    last = events[-1].response
    assert whole.usage is not None
    assert last.usage.model_copy(update={"input_tokens_details": whole.usage.input_tokens_details}) == whole.usage
    # The same prompt again: its full blocks come from the prefix cache.
    assert 0 < last.usage.input_tokens_details.cached_tokens < last.usage.input_tokens
    assert last.output_text == whole.output_text
    assert events[0].response.status == "in_progress"
    assert events[0].response.output == []


@pytest.mark.long
def test_the_packages_own_accumulator_reads_the_stream(client: OpenAI) -> None:
    extra = {"seed": 11}
    whole = client.responses.create(model="tiny", input="Hello", extra_body=extra)
    assert whole.status == "completed"
    with client.responses.stream(model="tiny", input="Hello", extra_body=extra) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == whole.output_text


def test_logprobs_are_included_on_demand(server: Served, client: OpenAI) -> None:
    given: dict[str, Any] = {"max_output_tokens": 8, "extra_body": {"seed": 3}, "top_logprobs": 2}
    include: Any = ["message.output_text.logprobs"]
    params = SamplingParams(max_tokens=8, seed=3, logprobs=2)
    (expected,) = server.offline.chat(PLAIN, params, use_tqdm=False)
    rows = zip(expected.token_ids, expected.outputs[0].logprobs or (), strict=True)
    values = [row[token].logprob for token, row in rows]
    whole: Any = client.responses.create(include=include, **GIVEN, **given)
    assert [each.logprob for each in whole.output[0].content[0].logprobs] == values
    assert all(len(each.top_logprobs) == 2 for each in whole.output[0].content[0].logprobs)
    events: Any = list(client.responses.create(include=include, stream=True, **GIVEN, **given))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [each.logprob for delta in deltas for each in delta.logprobs] == values
    plain: Any = client.responses.create(**GIVEN, **given)
    assert plain.output[0].content[0].logprobs == []


def test_fields_of_the_request_are_repeated(client: OpenAI) -> None:
    tools: Any = [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}]
    reply = client.responses.create(
        **GIVEN, tools=tools, metadata={"a": "b"}, max_output_tokens=2, temperature=0.5, store=True
    )
    assert reply.metadata == {"a": "b"}
    assert reply.instructions == "Answer."
    assert (reply.temperature, reply.max_output_tokens, reply.tool_choice) == (0.5, 2, "auto")
    assert reply.tools[0].model_dump(exclude_none=True) == tools[0]


def test_tools_of_other_types_are_left_out_with_a_warning(engine: Served, caplog: pytest.LogCaptureFixture) -> None:
    """Codex offers some in each request, and repeats searches of an earlier server."""
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    items = [{"role": "user", "content": "a"}, {"type": "web_search_call", "id": "w", "status": "completed"}]
    body = {"input": items, "tools": [{"type": "web_search"}, function, {"type": "custom", "name": "p"}]}
    # Of its own: it reports so much at most, and other tests draw names.
    with engine.again() as server:
        for _ in range(2):
            status, _, reply = server.send("POST", "/v1/responses", {**body, "max_output_tokens": 1})
            assert (status, reply["tools"]) == (200, [function])
    kinds = ("tools of type 'custom'", "tools of type 'web_search'", "input items of type 'web_search_call'")
    told = [message for record in caplog.records if " of type " in (message := record.getMessage())]
    assert told == [f"requests have {kind}: ignored (shown once)" for kind in kinds]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "previous": ({"previous_response_id": "resp-1"}, "previous_response_id"),
    "background": ({"background": True}, "background"),
    "truncation": ({"truncation": "middle"}, "truncation"),
    "image": ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    "item": ({"input": [{"type": "local_shell_call_output", "output": "a"}]}, "input"),
    "reference": ({"input": [{"type": "item_reference", "id": "a"}]}, "input"),
    "nothing": ({"input": []}, "input"),
    "search": ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    "nameless": ({"tools": [{"type": "function"}]}, "tools"),
    "effort": ({"reasoning": {"effort": "huge"}}, "reasoning"),
    "forced": ({"tool_choice": "required"}, "tool_choice"),
    "long": ({"input": "a" * 9000}, "input"),
    "hot": ({"temperature": -1}, "temperature"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_unsupported_fields_are_refused_by_name(client: OpenAI, name: str, stream: bool) -> None:
    given, field = REFUSED[name]
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(**{**GIVEN, **given}, stream=stream)
    assert caught.value.param == field
