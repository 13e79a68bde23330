"""Traces over HTTP: every step of an answer, with its draft tree."""

import itertools
from typing import Any

import msgspec
import pytest
from openai import OpenAI

from specdec import SamplingParams
from specdec.core.step_report import StepReporter
from tests.specdec.server.running import Served

MESSAGES = [{"role": "user", "content": "the cat and the dog"}]
COMMON: dict[str, Any] = {"temperature": 0.8, "seed": 4, "ignore_eos": True, "max_tokens": 64, "return_token_ids": True}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "the cat and the dog"},
}


def parts_of(stream: bytes) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in stream.decode().splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [msgspec.json.decode(line) for line in lines]


def ask(server: Served, path: str, stream: bool, **more: Any) -> list[dict[str, Any]]:
    """Return per choice its text, tokens and steps."""
    status, _, reply = server.send("POST", path, {**ROUTES[path], **COMMON, "trace": True, "stream": stream, **more})
    assert status == 200, reply
    found = [{"text": "", "tokens": [], "steps": []} for _ in range(more.get("n", 1))]
    for part in parts_of(reply) if stream else [reply]:
        for choice in part["choices"]:
            own = found[choice["index"]]
            said = choice.get("delta") or choice.get("message") or {}
            own["text"] += choice.get("text") or said.get("content") or ""
            own["tokens"] += choice.get("token_ids") or []
            own["steps"] += choice.get("trace") or []
    return found


def check_steps(steps: list[dict[str, Any]], text: str, tokens: list[int]) -> None:
    assert [each["token"] for step in steps for each in step["output"]] == tokens
    assert "".join(piece["text"] for step in steps for piece in step["pieces"]) == text
    assert set(steps[0]) == {"seconds", "plain_seconds", "root", "nodes", "output", "pieces"}
    assert steps[0]["nodes"] == []
    for before, step in itertools.pairwise(steps):
        assert step["root"]["token"] == before["output"][-1]["token"]
        accepted = [node for node in step["nodes"] if node["accepted"]]
        assert [node["token"] for node in accepted] == [one["token"] for one in step["output"] if one["accepted"]]
        for place, node in enumerate(step["nodes"]):
            assert set(node) == {"token", "text", "parent", "value", "target_prob", "accepted"}
            assert -1 <= node["parent"] < place
            assert node["value"] <= 0
            assert 0 <= node["target_prob"] <= 1
            assert isinstance(node["text"], str)


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ROUTES)
def test_an_answer_has_its_steps(server: Served, path: str, stream: bool) -> None:
    choices = ask(server, path, stream, n=2)
    prompt: Any = ROUTES[path].get("prompt") or server.offline.chat_prompt(MESSAGES)
    params = SamplingParams(temperature=0.8, seed=4, ignore_eos=True, max_tokens=64, n=2)
    *_, expected = server.offline.stream(prompt, params, trace=True)
    assert any(node["accepted"] for choice in choices for step in choice["steps"] for node in step["nodes"])
    for choice, output in zip(choices, expected.outputs, strict=True):
        check_steps(choice["steps"], output.text, output.token_ids)
        assert choice["text"] == output.text
        for step, traced in zip(choice["steps"], output.trace, strict=True):
            assert [(node["token"], node["parent"]) for node in step["nodes"]] == [
                *zip(traced.tokens, traced.parents, strict=True)
            ]
            assert [node["value"] for node in step["nodes"]] == pytest.approx(traced.values, rel=1e-6)
            assert [node["target_prob"] for node in step["nodes"]] == pytest.approx(traced.probs, rel=1e-6)


def test_a_step_says_what_it_would_take_without_drafts(server: Served) -> None:
    (choice,) = ask(server, "/v1/chat/completions", True)
    assert any(step["nodes"] for step in choice["steps"])
    assert all(step["plain_seconds"] > 0 for step in choice["steps"])
    (plain,) = ask(server, "/v1/chat/completions", True, speculation={"enabled": False})
    assert [step["plain_seconds"] for step in plain["steps"]] == [step["seconds"] for step in plain["steps"]]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("include", [False, True])
def test_the_text_of_steps_ends_before_a_stop_string(server: Served, path: str, include: bool) -> None:
    (free,) = ask(server, path, True)
    stop = free["text"][8:11]
    for stream in (False, True):
        (choice,) = ask(server, path, stream, stop=stop, include_stop_str_in_output=include)
        assert choice["text"] == free["text"][: free["text"].index(stop) + (len(stop) if include else 0)]
        assert "".join(piece["text"] for step in choice["steps"] for piece in step["pieces"]) == choice["text"]


@pytest.mark.parametrize("include", [False, True])
def test_the_text_of_steps_ends_before_a_stop_token(server: Served, include: bool) -> None:
    params = SamplingParams(temperature=0.8, seed=4, ignore_eos=True, max_tokens=24)
    (free,) = server.offline.generate("the cat", params, use_tqdm=False)
    stop = SamplingParams(
        temperature=0.8,
        seed=4,
        ignore_eos=True,
        max_tokens=24,
        stop_token_ids=[free.token_ids[9]],
        include_stop_str_in_output=include,
    )
    assert server.offline.tokenizer is not None
    reporter = StepReporter(server.offline.tokenizer.backend, stop)
    steps = []
    for state in server.offline.stream("the cat", stop, trace=True):
        steps += reporter.new_steps(state.outputs[0])
    assert state.outputs[0].finish_reason == "stop"
    assert "".join(piece.text for step in steps for piece in step.pieces) == state.text


def test_openais_package_passes_it_on(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,  # type: ignore[arg-type]
        stream=True,
        max_tokens=8,
        extra_body={"trace": True, "ignore_eos": True},
    )
    steps = [step for part in stream for choice in part.choices for step in getattr(choice, "trace", None) or ()]
    assert sum(len(step["output"]) for step in steps) == 8


@pytest.mark.parametrize("path", ROUTES)
def test_other_answers_have_none(server: Served, path: str) -> None:
    for body in (ROUTES[path], {**ROUTES[path], "trace": False}):
        status, _, reply = server.send("POST", path, {**body, "max_tokens": 4})
        assert status == 200
        assert "trace" not in reply["choices"][0]


def test_wrong_trace_fields_are_refused(server: Served) -> None:
    bodies = {**ROUTES, "/v1/responses": {"input": "a"}}
    for path in ROUTES:
        status, _, reply = server.send("POST", path, {**bodies[path], "trace": "yes"})
        assert (status, reply["error"]["param"]) == (400, "trace")
    status, _, reply = server.send("POST", "/v1/responses", {"input": "a", "trace": True})
    assert (status, reply["error"]["message"]) == (400, "trace is not supported; use /v1/chat/completions")


def test_a_server_that_gives_no_probabilities_gives_no_trace(engine: Served) -> None:
    with engine.again(max_logprobs=0) as server:
        for path, body in ROUTES.items():
            status, _, reply = server.send("POST", path, {**body, "trace": True})
            assert (status, reply["error"]["param"]) == (400, "trace")
            assert server.send("POST", path, {**body, "max_tokens": 1})[0] == 200
