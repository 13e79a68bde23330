"""Routes beside the generation of text."""

import threading
from pathlib import Path
from typing import Any

import pytest
from openai import NotFoundError, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from specdec import __version__
from specdec.server.server_settings import ServerSettings
from tests.fakes import edit_json, save_random_head
from tests.specdec.server.running import Served, wait_until
from tests.specdec.tiny_checkpoints import CHARACTERS, Tiny

pytestmark = pytest.mark.slow

PROMPT = "a restaurant in"


def test_models_are_listed_under_all_their_names(client: OpenAI) -> None:
    cards: list[Any] = list(client.models.list())
    assert [card.id for card in cards] == ["tiny", "other"]
    assert cards[0].max_model_len == 8192
    assert client.models.retrieve("other").id == "other"
    with pytest.raises(NotFoundError):
        client.models.retrieve("gpt")


def test_text_becomes_tokens_and_text_again(server: Served) -> None:
    tokens = server.offline.generate(PROMPT, use_tqdm=False)[0].prompt_token_ids
    status, _, reply = server.send("POST", "/tokenize", {"prompt": PROMPT, "return_token_strs": True})
    assert status == 200
    assert reply == {
        "count": len(tokens),
        "max_model_len": 8192,
        "tokens": tokens,
        "token_strs": list(PROMPT),
    }
    assert server.send("POST", "/detokenize", {"tokens": tokens})[2] == {"prompt": PROMPT}
    messages = [{"role": "user", "content": "Hi"}]
    chat = server.send("POST", "/tokenize", {"messages": messages})[2]
    assert chat["tokens"] == server.offline.chat_prompt(messages)
    # What clients send in a history is read alike.
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    history = [
        {"role": "developer", "content": ["a", {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": [{"type": "text", "text": "d"}], "tool_call_id": "1"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "e"}], "tool_calls": []},
        {"role": "user", "content": []},
    ]
    _, _, chat = server.send("POST", "/tokenize", {"messages": history})
    assert chat["tokens"] == server.offline.chat_prompt(history)
    for wrong in ({}, {"prompt": "a", "messages": messages}, {"messages": []}):
        assert server.send("POST", "/tokenize", wrong)[0] == 400
    assert server.send("POST", "/detokenize", {"tokens": [10**6]})[2]["error"]["param"] == "tokens"


def test_health_and_version(server: Served) -> None:
    assert server.send("GET", "/health")[0] == 200
    assert server.send("GET", "/ping")[0] == server.send("POST", "/ping")[0] == 200
    assert server.send("GET", "/version")[2] == {"version": __version__}


def test_every_answer_has_a_request_id(server: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1}
    _, headers, reply = server.send("POST", "/v1/completions", body, {"X-Request-Id": "mine-1"})
    assert headers["x-request-id"] == "mine-1"
    assert reply["id"] == "cmpl-mine-1"
    for bad in ("", "a" * 129, "a b", "é"):
        own = server.send("GET", "/nowhere", None, {"X-Request-Id": bad.encode().decode("latin-1")})[1]["x-request-id"]
        assert len(own) == 32


@pytest.mark.parametrize("name", ["cmpl-to-abort", "to-abort"])
def test_a_running_request_is_aborted_by_its_id(server: Served, name: str) -> None:
    found: list[Any] = []
    body = {"prompt": [[5, 6], [7]], "max_tokens": 8000, "ignore_eos": True}

    def run() -> None:
        found.append(server.send("POST", "/v1/completions", body, {"X-Request-Id": "to-abort"}))

    thread = threading.Thread(target=run)
    thread.start()
    while server.send("POST", "/abort", {"request_id": name})[2] != {"aborted": True}:
        assert thread.is_alive()
    thread.join()
    ((status, _, reply),) = found
    assert status == 200
    assert {choice["finish_reason"] for choice in reply["choices"]} == {"abort"}
    assert server.send("POST", "/abort", {"request_id": name})[2] == {"aborted": False}
    server.wait_until_idle()


def test_the_draft_head_is_replaced_where_that_is_allowed(engine: Served, folders: Tiny, tmp_path: Path) -> None:
    """While a request runs, whose tokens stay."""
    save_random_head(tmp_path, seed=1, vocab_size=len(CHARACTERS) + 3)
    edit_json(tmp_path / "config.json", max_position_embeddings=8192)
    body, key, admin = {"draft": str(tmp_path)}, {"Authorization": "Bearer k"}, {"Authorization": "Bearer a"}
    running = {"prompt": PROMPT, "max_tokens": 300, "seed": 1, "ignore_eos": True}
    with engine.again(api_key=["k"], admin_api_key=["a"]) as server:
        status, _, reply = server.send("POST", "/update_draft", body, admin)
        assert status == 403
        assert "--allow-draft-updates" in reply["error"]["message"]
        expected = server.send("POST", "/v1/completions", running, key)[2]["choices"][0]["text"]
    found: list[Any] = []
    with engine.again(api_key=["k"], admin_api_key=["a"], allow_draft_updates=True) as server:
        thread = threading.Thread(
            target=lambda: found.append(server.send("POST", "/v1/completions", running, key)[2]["choices"][0]["text"])
        )
        before = server.call(server.llm.stats()).queued
        thread.start()
        while server.call(server.llm.stats()).queued == before:
            pass
        assert server.send("POST", "/update_draft", body)[0] == 401
        for wrong in ({"draft": str(folders.wide_head)}, {"draft": "nowhere"}, {"draft": "x" * 5000}, {}):
            status, _, reply = server.send("POST", "/update_draft", wrong, admin)
            assert (status, reply["error"]["param"]) == (400, "draft")
        assert server.send("POST", "/update_draft", body, admin)[2] == body
        assert server.llm.config.draft == tmp_path
        thread.join()
        assert found == [expected]
        assert server.send("POST", "/update_draft", {"draft": str(folders.head)}, admin)[0] == 200
    with pytest.raises(ValueError, match=r"allow_draft_updates needs an administrator's key, .*; give --admin-api-key"):
        # The route would answer 403 to all.
        ServerSettings(allow_draft_updates=True, api_key=["k"])


def test_requests_of_the_same_id_do_not_disturb_each_other(server: Served) -> None:
    found: list[Any] = []

    def run(max_tokens: int) -> None:
        body = {"prompt": "a", "max_tokens": max_tokens, "ignore_eos": True}
        found.append(server.send("POST", "/v1/completions", body, {"X-Request-Id": "twice"})[2]["choices"][0])

    before = server.call(server.llm.stats()).queued
    thread = threading.Thread(target=run, args=(8000,))
    thread.start()
    while server.call(server.llm.stats()).queued == before:
        pass
    run(3)
    assert server.send("POST", "/abort", {"request_id": "twice"})[2] == {"aborted": True}
    thread.join()
    assert [choice["finish_reason"] for choice in found] == ["length", "abort"]


def _metrics(server: Served) -> dict[str, Any]:
    """Samples by their names, those of this server's model alone."""
    status, headers, text = server.send("GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    found: dict[str, Any] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key not in ("model_name", "engine")}
            if sample.name.startswith(("vllm:", "specdec:")) and not sample.name.startswith("specdec:http_"):
                assert sample.labels.get("model_name", "tiny") == "tiny"
                assert sample.labels["engine"] == "0"
            found[sample.name + "".join(f" {value}" for value in labels.values())] = sample.value
    return found


def test_metrics_count_what_happens(server: Served) -> None:
    before, count = _metrics(server), 3
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    for _ in range(count):
        server.send("POST", "/v1/completions", body)
    after = _metrics(server)
    change = {name: value - before.get(name, 0) for name, value in after.items()}
    assert change["vllm:prompt_tokens_total"] == count * len(PROMPT)
    assert change["vllm:generation_tokens_total"] == 12 * count
    assert change["vllm:request_success_total length"] == count
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_time_per_output_token_seconds"):
        assert change[f"vllm:{name}_count"] == count
        assert change[f"vllm:{name}_sum"] > 0
    assert change["vllm:inter_token_latency_seconds_count"] >= count
    assert change["vllm:prefix_cache_queries_total"] == count * len(PROMPT)
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert after["vllm:kv_cache_usage_perc"] == 0
    assert change["specdec:steps_total"] >= count
    assert change["specdec:draft_seconds_total"] > 0
    assert change["specdec:verify_seconds_total"] > 0
    accepted = change["vllm:spec_decode_num_accepted_tokens_total"]
    depths = [f"vllm:spec_decode_num_accepted_tokens_per_pos_total {depth}" for depth in range(3)]
    assert sum(change.get(name, 0) for name in depths) == accepted
    # Every step after the prompt's has a tree, except those in which one token is left.
    assert accepted < change["specdec:tree_tokens_total"] <= 11 * count
    assert change["specdec:tree_tokens_total"] <= accepted + change["vllm:spec_decode_num_drafts_total"]
    # Tokens after the first of each request: one per step, and the accepted drafts.
    assert accepted + change["specdec:steps_total"] - count == 11 * count
    assert change["vllm:spec_decode_num_drafts_total"] <= change["specdec:steps_total"]
    assert change["vllm:spec_decode_num_draft_tokens_total"] >= change["vllm:spec_decode_num_drafts_total"] > 0


def test_metrics_have_what_vllms_dashboards_read(server: Served) -> None:
    before = _metrics(server)
    body = {"prompt": PROMPT, "max_tokens": 12, "n": 2, "seed": 0, "ignore_eos": True}
    assert server.send("POST", "/v1/completions", body)[0] == 200
    assert server.send("POST", "/v1/completions", {**body, "n": -1})[0] == 400
    assert server.send("BREW", "/v1/pots/3")[0] == 404
    # Requests are counted behind their answers.
    wait_until(lambda: "http_requests_total none other 4xx" in _metrics(server))
    after = _metrics(server)
    change = {name: value - before.get(name, 0) for name, value in after.items()}
    times = {
        name: change[f"vllm:request_{name}_time_seconds_sum"] for name in ("queue", "prefill", "decode", "inference")
    }
    for name, seconds in times.items():
        assert change[f"vllm:request_{name}_time_seconds_count"] == 1
        assert seconds > 0
    assert times["inference"] == pytest.approx(times["prefill"] + times["decode"])
    assert times["queue"] + times["inference"] <= change["vllm:e2e_request_latency_seconds_sum"]
    assert change["vllm:request_max_num_generation_tokens_sum"] == 12
    assert change["vllm:iteration_tokens_total_count"] == change["specdec:steps_total"] > 0
    # Known tokens and draft nodes of all steps.
    total = change["specdec:known_tokens_total"] + change["specdec:draft_nodes_granted_total"]
    assert change["vllm:iteration_tokens_total_sum"] == total
    assert change["vllm:iteration_tokens_total_bucket +Inf"] == change["vllm:iteration_tokens_total_count"]
    (config,) = [name for name in after if name.startswith("vllm:cache_config_info")]
    assert after[config] == 1
    assert change["http_requests_total /v1/completions POST 2xx"] == 1
    assert change["http_requests_total /v1/completions POST 4xx"] == 1
    assert change["http_requests_total none other 4xx"] == 1
    assert change["http_request_duration_seconds_count /v1/completions POST"] == 2
    assert change["specdec:http_requests_refused_total 400"] == 1
    assert change["specdec:http_requests_refused_total 404"] == 1
    assert after["specdec:engine_restarts_total"] == 0
    assert after["process_resident_memory_bytes"] > 0


def test_all_samples_of_a_request_that_fails_are_counted(server: Served) -> None:
    """The first one fails in a step before the others."""
    before = _metrics(server)
    body = {"prompt": PROMPT, "n": 3, "seed": 0, "allowed_token_ids": [2], "min_tokens": 1}
    assert server.send("POST", "/v1/completions", body)[0] == 400
    assert _metrics(server)["vllm:request_success_total error"] - before["vllm:request_success_total error"] == 3


def test_the_cache_is_described_by_labels(server: Served) -> None:
    text = server.send("GET", "/metrics")[2].decode()
    (line,) = [line for line in text.splitlines() if line.startswith("vllm:cache_config_info")]
    labels = dict(part.split("=") for part in line.partition("{")[2].partition("}")[0].split(","))
    assert labels["block_size"] == '"16"'
    assert labels["enable_prefix_caching"] == '"True"'
    blocks = server.call(server.llm.stats()).num_blocks
    assert labels["num_gpu_blocks"] == f'"{blocks}"'
    assert blocks > 0
