"""`/v1/completions` through OpenAI's package: every parameter, whole and streamed, gives the tokens of `LLM`."""

import asyncio
from typing import Any

import msgspec
import pytest
from openai import APIError, AsyncOpenAI, BadRequestError, NotFoundError, OpenAI
from openai.types import Completion

from specdec import SamplingParams
from specdec.core.outputs import Logprob
from specdec.models.generation_config import GenerationConfig
from tests.specdec.server.raw_client import events
from tests.specdec.server.running import Served
from tests.specdec.tiny_checkpoints import CHARACTERS

pytestmark = pytest.mark.slow

PROMPT = "a restaurant in"
# What a client sends, and the same as sampling parameters where it is spelled differently.
PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seed": {"seed": 5},
    "warm": {"seed": 5, "temperature": 0.7, "top_p": 0.8},
    "penalties": {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    "logit_bias": {"temperature": 0, "logit_bias": {"7": 50, "9": 49.5}},
    "stop": {"seed": 3, "stop": ["e", "zz"]},
    "max_tokens": {"seed": 3, "max_tokens": 3},
}
VLLM: dict[str, dict[str, Any]] = {
    "top_k": {"seed": 1, "top_k": 3},
    "min_p": {"seed": 1, "min_p": 0.2},
    "repetition_penalty": {"seed": 1, "repetition_penalty": 1.7},
    "min_tokens": {"seed": 1, "min_tokens": 9, "logit_bias": {2: 8}},
    "ignore_eos": {"seed": 1, "ignore_eos": True, "logit_bias": {2: 8}},
    "stop_token_ids": {"seed": 1, "stop_token_ids": list(range(20, 40))},
    "include_stop": {"seed": 1, "stop": ["a", "b", "c", "d"], "include_stop_str_in_output": True},
    "allowed": {"seed": 1, "allowed_token_ids": [5, 6, 7]},
    "bad_words": {"seed": 1, "bad_words": ["a", "b", "1"]},
    "special": {"seed": 1, "ignore_eos": True, "logit_bias": {2: 8}, "skip_special_tokens": False},
}


def wanted(server: Served, parameters: dict[str, Any], prompt: Any = PROMPT) -> Any:
    given = {"max_tokens": 24, **parameters}
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): value for token, value in given["logit_bias"].items()}
    (output,) = server.offline.generate(prompt, SamplingParams(**given), use_tqdm=False)
    return output


def create(client: OpenAI, parameters: dict[str, Any], stream: bool, **more: Any) -> list[Completion]:
    """Send parameters; those that only vLLM has in the extra body, as its users do."""
    names = (
        "max_tokens",
        "temperature",
        "top_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "stop",
    )
    given = {"max_tokens": 24, **parameters}
    known = {name: value for name, value in given.items() if name in names}
    extra = {name: value for name, value in given.items() if name not in names}
    extra["return_token_ids"] = True
    if not stream:
        return [client.completions.create(model="tiny", prompt=PROMPT, extra_body=extra, **known, **more)]
    # OpenAI's own type of streamed parts lacks the finish reason None.
    loose = client.with_options()
    loose._strict_response_validation = False
    return list(loose.completions.create(model="tiny", prompt=PROMPT, stream=True, extra_body=extra, **known, **more))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", [*PARAMETERS, *VLLM])
def test_tokens_are_those_of_the_offline_api(server: Served, client: OpenAI, name: str, stream: bool) -> None:
    parameters = (PARAMETERS | VLLM)[name]
    expected = wanted(server, parameters)
    parts = create(client, parameters, stream)
    choices = [choice for part in parts for choice in part.choices]
    tokens = [token for choice in choices for token in choice.token_ids or ()]  # type: ignore[attr-defined]
    assert tokens == expected.token_ids
    assert "".join(choice.text for choice in choices) == expected.text
    assert choices[-1].finish_reason == expected.finish_reason
    assert choices[-1].stop_reason == expected.outputs[0].stop_reason  # type: ignore[attr-defined]
    assert all(choice.finish_reason is None for choice in choices[:-1])
    if not stream:
        (part,) = parts
        assert part.usage is not None
        assert part.usage.prompt_tokens == len(expected.prompt_token_ids)
        assert part.usage.total_tokens == part.usage.prompt_tokens + len(tokens)
    assert {part.id for part in parts} == {parts[0].id}


@pytest.mark.long
def test_the_parameters_differ_in_what_they_give(server: Served) -> None:
    """Else the test above would pass on a server that ignores them."""
    texts = [tuple(wanted(server, parameters).token_ids) for parameters in (PARAMETERS | VLLM).values()]
    assert len(set(texts)) >= len(texts) - 1


PROMPTS: list[Any] = [PROMPT, ["a", "taxi to"], [5, 6, 7], [[5, 6, 7], [9]]]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("prompt", PROMPTS, ids=["text", "texts", "tokens", "lists"])
def test_prompts_of_every_form(server: Served, client: OpenAI, prompt: Any, stream: bool) -> None:
    params = SamplingParams(seed=4, max_tokens=12, n=2)
    outputs = server.offline.generate(prompt, params, use_tqdm=False)
    texts = {2 * place + output.index: output.text for place, one in enumerate(outputs) for output in one.outputs}
    client._strict_response_validation = not stream
    reply: Any = client.completions.create(
        model="tiny", prompt=prompt, seed=4, max_tokens=12, n=2, stream=stream, stream_options=None
    )
    found = dict.fromkeys(texts, "")
    ends: list[int] = []
    for part in reply if stream else [reply]:
        for choice in part.choices:
            found[choice.index] += choice.text
            ends += [choice.index] if choice.finish_reason else []
    assert found == texts
    assert sorted(ends) == sorted(texts)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("max_tokens", [0, 1, 6])
def test_echo_with_logprobs_scores_the_prompt(server: Served, client: OpenAI, stream: bool, max_tokens: int) -> None:
    """Requests of lm-eval."""
    # The first token has no log-probability, which the type does not know.
    client._strict_response_validation = False
    reply: Any = client.completions.create(
        model="tiny", prompt=PROMPT, echo=True, logprobs=2, max_tokens=max_tokens, temperature=0, stream=stream
    )
    choices = [choice for part in (reply if stream else [reply]) for choice in part.choices]
    params = SamplingParams(temperature=0, max_tokens=max(max_tokens, 1), logprobs=2, prompt_logprobs=2)
    (output,) = server.offline.generate(PROMPT, params, use_tqdm=False)
    tokens = (output.prompt_token_ids + output.token_ids)[: len(PROMPT) + max_tokens]
    rows = [*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ())][: len(tokens)]
    text = PROMPT + output.text if max_tokens else PROMPT
    assert "".join(choice.text for choice in choices) == text
    parts = [choice.logprobs for choice in choices if choice.logprobs]
    values = [value for part in parts for value in part.token_logprobs]
    assert values[0] is None
    assert values[1:] == [row[token].logprob for row, token in zip(rows[1:], tokens[1:], strict=True)]
    names = [name for part in parts for name in part.tokens]
    assert names == [CHARACTERS[token - 3] if token > 2 else "</s>" for token in tokens]
    offsets = [offset for part in parts for offset in part.text_offset]
    assert offsets == [sum(map(len, names[:place])) for place in range(len(names))]
    tops = [top for part in parts for top in part.top_logprobs]
    assert all(2 <= len(top) <= 3 for top in tops[1:])
    assert choices[-1].finish_reason == (output.finish_reason if max_tokens else "length")


def test_usage_comes_last_and_only_where_it_is_asked_for(client: OpenAI) -> None:
    given: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    *parts, last = create(client, given, True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(PROMPT), 24)
    assert {part.usage for part in parts} == {None}
    assert "usage" not in create(client, given, True)[-1].model_fields_set
    running = create(client, given, True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [part.usage.completion_tokens for part in running if part.usage]
    assert len(counts) == len(running)
    assert counts == sorted(counts)
    assert counts[-1] == 24


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_usage_says_how_much_of_the_prompts_was_cached(server: Served, stream: bool) -> None:
    """Of both prompts together; the block of the last token is always computed."""
    body = {"prompt": ["b" * 100, "c" * 100], "max_tokens": 1}
    assert server.send("POST", "/v1/completions", body)[0] == 200
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    _, _, reply = server.send("POST", "/v1/completions", {**body, **more})
    usage = (events(reply)[-1] if stream else reply)["usage"]
    assert 100 < usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"] == 200


def test_the_stream_is_sent_as_openai_sends_it(server: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "ignore_eos": True, "stream": True}
    status, headers, text = server.send("POST", "/v1/completions", body)
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    events = text.decode().split("\n\n")
    assert events.pop() == ""
    assert events.pop() == "data: [DONE]"
    assert events
    assert all(event.startswith('data: {"id":"cmpl-') for event in events)


def test_the_default_is_sixteen_tokens(client: OpenAI) -> None:
    reply = client.completions.create(model="other", prompt=PROMPT, extra_body={"ignore_eos": True})
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 16
    assert reply.model == "tiny"


def test_special_tokens_and_truncation(server: Served, client: OpenAI) -> None:
    extra = {"truncate_prompt_tokens": 4, "return_token_ids": True, "add_special_tokens": False}
    reply: Any = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1, extra_body=extra)
    assert reply.choices[0].prompt_token_ids == server.llm.tokenizer.encode(PROMPT)[-4:]  # type: ignore[union-attr]
    given = {"prompt": PROMPT, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0, **extra}
    (choice,) = server.send("POST", "/v1/completions", given)[2]["choices"]
    assert choice["text"].startswith(PROMPT[-4:])
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert choice["logprobs"]["text_offset"] == list(range(5))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_echo_alone_has_no_token_of_its_own(client: OpenAI, stream: bool) -> None:
    """The engine generates one, which is thrown away."""
    made: Any = create(client, {"max_tokens": 0}, stream, echo=True)
    choices = [choice for part in made for choice in part.choices]
    assert [token for choice in choices for token in choice.token_ids] == []
    assert len(choices[0].prompt_token_ids) == len(PROMPT)
    assert "".join(choice.text for choice in choices) == PROMPT


def test_prompt_logprobs_are_vllms(server: Served, client: OpenAI) -> None:
    reply: Any = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1, extra_body={"prompt_logprobs": 1})
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    (output,) = server.offline.generate(PROMPT, params, use_tqdm=False)
    found = reply.choices[0].prompt_logprobs
    assert found[0] is None
    for row, expected in zip(found[1:], (output.prompt_logprobs or ())[1:], strict=True):
        assert expected is not None
        # Its last field is ours alone.
        names = Logprob._fields[:3]
        assert row == {str(token): dict(zip(names, entry, strict=False)) for token, entry in expected.items()}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "suffix": ({"suffix": "end"}, "suffix"),
    "best_of": ({"best_of": 3}, "best_of"),
    "logprobs": ({"logprobs": 21}, "logprobs"),
    "temperature": ({"temperature": -1}, "temperature"),
    "n": ({"n": 129}, "n"),
    "none": ({"n": 0}, "n"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens"),
    "bias": ({"logit_bias": {"x": 1}}, "logit_bias"),
    "bias token": ({"logit_bias": {"5000": 1}}, "logit_bias"),
    "empty": ({"prompt": ""}, "prompt"),
    "no prompts": ({"prompt": []}, "prompt"),
    "choices": ({"prompt": ["a"] * 17, "n": 128}, "prompt"),
    "many": ({"prompt": ["a"] * 2049}, "prompt"),
    "token": ({"prompt": [5000]}, "prompt"),
    "long": ({"prompt": [5] * 9000}, "prompt"),
    "guided": ({"extra_body": {"guided_json": {}}}, "guided_json"),
    "stream_options": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "big": ({"extra_body": {"priority": 1 << 70}}, "priority"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_fields_are_refused_by_name(client: OpenAI, name: str) -> None:
    given, field = REFUSED[name]
    with pytest.raises(BadRequestError) as caught:
        client.completions.create(**{"model": "tiny", "prompt": PROMPT, **given})
    assert caught.value.param == field
    assert caught.value.type == "invalid_request_error"
    assert "\n" not in caught.value.message


def test_another_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(NotFoundError) as caught:
        client.completions.create(model="gpt", prompt=PROMPT)
    assert caught.value.code == "model_not_found"


def test_unknown_fields_are_ignored_with_a_warning(engine: Served, caplog: pytest.LogCaptureFixture) -> None:
    # Of its own: it reports so many names at most, and other tests draw some.
    with engine.again() as server:
        for _ in range(2):
            body = {"prompt": PROMPT, "max_tokens": 1, "spaces_between": True}
            assert server.send("POST", "/v1/completions", body)[0] == 200
    assert [record.getMessage() for record in caplog.records if "spaces_between" in record.getMessage()] == [
        "requests have the unknown field 'spaces_between': ignored (shown once)"
    ]


# Token 5 is "2". After one, no token can follow.
DEAD_END: dict[str, Any] = {"allowed_token_ids": [5], "bad_words": ["22"]}


def test_a_request_without_a_possible_token_is_refused(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="no token can follow") as caught:
        client.completions.create(model="tiny", prompt=PROMPT, extra_body=DEAD_END)
    assert caught.value.code == "no_token"


def test_an_error_after_the_stream_has_begun_is_its_last_event(server: Served, client: OpenAI) -> None:
    body = {"prompt": PROMPT, "stream": True, **DEAD_END}
    status, _, text = server.send("POST", "/v1/completions", body)
    first, error, done, rest = text.decode().split("\n\n")
    assert (status, done, rest) == (200, "data: [DONE]", "")
    assert msgspec.json.decode(first.removeprefix("data: "))["choices"][0]["text"] == "2"
    assert msgspec.json.decode(error.removeprefix("data: "))["error"]["code"] == "no_token"
    stream = client.with_options().completions.create(model="tiny", prompt=PROMPT, stream=True, extra_body=DEAD_END)
    with pytest.raises(APIError, match="no token can follow"):
        list(stream)
    responses = client.responses.create(model="tiny", input="a", stream=True, extra_body=DEAD_END)
    *_, last = responses
    assert last.type == "error"
    assert last.code == "no_token"


def test_parameters_that_are_left_out_are_the_models(engine: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"temperature": 0.0, "max_tokens": 5}
    monkeypatch.setattr(engine.llm, "generation_config", GenerationConfig(frozenset({2}), params))
    body = {"prompt": PROMPT, "seed": 1, "ignore_eos": True, "return_token_ids": True}
    for source, expected in {"auto": params, "vllm": {"max_tokens": 16}}.items():
        with engine.again(generation_config=source) as server:
            choice = server.send("POST", "/v1/completions", body)[2]["choices"][0]
            own = server.send("POST", "/v1/completions", {**body, "max_tokens": 7})[2]["choices"][0]
        ((output,), (longer,)) = (
            engine.offline.generate(
                PROMPT, SamplingParams(**{"seed": 1, "ignore_eos": True, **expected, **more}), use_tqdm=False
            )
            for more in ({}, {"max_tokens": 7})
        )
        assert choice["token_ids"] == output.token_ids
        assert own["token_ids"] == longer.token_ids
    # A stop string of the file's, which a request may replace.
    whole = engine.offline.generate(PROMPT, SamplingParams(**params), use_tqdm=False)[0].text
    with_stop = GenerationConfig(frozenset({2}), {**params, "stop": whole[2]})
    monkeypatch.setattr(engine.llm, "generation_config", with_stop)
    with engine.again() as server:
        texts = [
            server.send("POST", "/v1/completions", {"prompt": PROMPT, **more})[2]["choices"][0]["text"]
            for more in ({}, {"stop": ["~~~"]})
        ]
    assert texts == [whole[: whole.index(whole[2])], whole]


@pytest.mark.long
def test_asynchronous_clients_share_the_engine(server: Served) -> None:
    async def run() -> list[list[str]]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def text(seed: int) -> list[str]:
                whole, streamed = await asyncio.gather(
                    client.completions.create(model="tiny", prompt=PROMPT, seed=seed, max_tokens=20),
                    client.completions.create(model="tiny", prompt=PROMPT, seed=seed, max_tokens=20, stream=True),
                )
                return [whole.choices[0].text, "".join([part.choices[0].text async for part in streamed])]

            return await asyncio.gather(*map(text, range(12)))

    params = [SamplingParams(seed=seed, max_tokens=20) for seed in range(12)]
    outputs = server.offline.generate([PROMPT] * 12, params, use_tqdm=False)
    assert asyncio.run(run()) == [[output.text] * 2 for output in outputs]
