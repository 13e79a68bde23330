"""Speculation of single requests over HTTP: it is followed, and no token shows it."""

from typing import Any

import msgspec
import pytest

from specdec import SamplingParams
from specdec.core.outputs import Step
from tests.specdec.server.running import Served

pytestmark = pytest.mark.slow

PROMPT = "a restaurant in"
COMMON: dict[str, Any] = {"seed": 5, "ignore_eos": True}
# Per route its body for 24 tokens.
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 24},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 24},
}


def text(reply: dict[str, Any]) -> str:
    if "output" in reply:
        return str(reply["output"][0]["content"][0]["text"])
    choice = reply["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize("path", ROUTES)
def test_a_request_chooses_its_speculation_on_every_route(server: Served, path: str) -> None:
    texts, trees, nodes = [], [], []
    asked: list[Any] = [None, {}, {"enabled": False}, {"max_nodes": 1, "max_depth": None}, {"max_depth": 1}]
    for speculation in asked:
        before = server.call(server.llm.stats())
        status, _, reply = server.send("POST", path, {**ROUTES[path], **COMMON, "speculation": speculation})
        assert status == 200
        after = server.call(server.llm.stats())
        texts.append(text(reply))
        trees.append(after.trees_verified - before.trees_verified)
        nodes.append(after.drafts_verified - before.drafts_verified)
    assert len(set(texts)) == 1
    assert trees[2] == 0
    assert trees[3] == nodes[3] > 0
    # The head's trees are two nodes wide.
    assert 0 < nodes[4] <= 2 * trees[4]
    assert nodes[0] == nodes[1] > 2 * trees[0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"max_nodes": 0}, "speculation: max_nodes is 0; it must be at least 1, or None"),
        ({"max_depth": -1}, "speculation: max_depth is -1; it must be at least 1, or None"),
        ({"nodes": 3}, "speculation holds 'nodes'; it may hold enabled, max_nodes, max_depth"),
        ({"enabled": 1}, "speculation.enabled: Input should be a valid boolean"),
        (False, "speculation: Input should be a valid dictionary or object to extract fields from"),
    ],
)
@pytest.mark.parametrize("path", ROUTES)
def test_another_value_is_refused_in_one_line(server: Served, path: str, value: Any, message: str) -> None:
    status, _, reply = server.send("POST", path, {**ROUTES[path], "speculation": value})
    assert (status, reply["error"]["param"], reply["error"]["message"]) == (400, "speculation", message)


def usage_event(text: bytes) -> dict[str, Any]:
    """Return the last event of a stream but [DONE]."""
    events = [line.removeprefix("data: ") for line in text.decode().splitlines() if line.startswith("data: ")]
    found: dict[str, Any] = msgspec.json.decode([one for one in events if one != "[DONE]"][-1])
    return found.get("response", found)  # type: ignore[no-any-return]


def figures(server: Served, path: str, stream: bool, **more: Any) -> dict[str, Any]:
    """Return the answer, or the part of a streamed one, that has the figures."""
    if stream:
        more |= {"stream": True, "stream_options": {"include_usage": True}}
    status, _, reply = server.send("POST", path, {**ROUTES[path], **COMMON, **more})
    assert status == 200
    return usage_event(reply) if stream else reply  # type: ignore[no-any-return]


def expected_steps(server: Served, path: str) -> list[Step]:
    """Return the steps of the same request in this process; trees do not depend on what else runs."""
    prompt: Any = PROMPT
    if path != "/v1/completions":
        prompt = server.offline.chat_prompt([{"role": "user", "content": PROMPT}])
    (output,) = server.offline.generate(prompt, SamplingParams(**COMMON, max_tokens=24), use_tqdm=False)
    steps = output.outputs[0].tree_steps
    assert sum(step.nodes for step in steps) == output.stats.drafted
    assert sum(step.accepted for step in steps) == sum(output.outputs[0].accepted)
    return steps


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ROUTES)
def test_metrics_of_a_request_are_vllms(engine: Served, path: str, stream: bool) -> None:
    steps = expected_steps(engine, path)
    accepted, nodes = sum(step.accepted for step in steps), sum(step.nodes for step in steps)
    summary = {
        "mean_acceptance_length": 1 + accepted / len(steps),
        "draft_acceptance_rate": accepted / nodes,
        "acceptance_histogram": [sum(step.accepted == count for step in steps) for count in range(4)],
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": nodes,
        "num_spec_tokens": 3,
    }
    lists = {
        "per_step_accepted": [step.accepted for step in steps],
        "per_step_drafted": [step.nodes for step in steps],
    }
    for choice, expected in {"summary": summary, "detailed": summary | lists}.items():
        with engine.again(per_request_spec_decode_metrics=choice) as server:
            assert figures(server, path, stream)["metrics"] == {"speculative_decoding": expected}
            assert figures(server, path, stream, speculation={"enabled": False})["metrics"] is None
            if path != "/v1/responses":
                assert figures(server, path, stream, n=2)["metrics"] is None
    with engine.again() as server:
        assert {"metrics", "sglext"}.isdisjoint(figures(server, path, stream))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ROUTES)
def test_sglangs_figures_come_on_demand(server: Served, path: str, stream: bool) -> None:
    steps = expected_steps(server, path)
    accepted, nodes = sum(step.accepted for step in steps), sum(step.nodes for step in steps)
    details = figures(server, path, stream, return_spec_tokens_details=True)["sglext"]["spec_tokens_details"]
    most = max(step.accepted for step in steps)
    assert details == {
        "spec_verify_ct": len(steps),
        "spec_accept_length": 1 + accepted / len(steps),
        "spec_accept_rate": accepted / nodes,
        "spec_num_correct_drafts": accepted,
        "spec_num_proposed_drafts": nodes,
        "spec_correct_drafts_histogram": [sum(step.accepted == count for step in steps) for count in range(most + 1)],
    }
    if path != "/v1/responses":
        body = {**ROUTES[path], **COMMON, "return_meta_info": True, "stream": stream}
        reply = server.send("POST", path, body)[2]
        (choice,) = (usage_event(reply) if stream else reply)["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["meta_info"] == details
        reply = server.send("POST", path, {**body, "stream": False, "speculation": {"enabled": False}})[2]
        assert reply["choices"][0]["meta_info"]["spec_verify_ct"] == 0
