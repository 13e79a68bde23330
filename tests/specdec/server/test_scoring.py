"""`/v1/score_choices`: the scores of `LLM`, and requests that ask for something else."""

from typing import Any

import pytest

from specdec import SamplingParams
from tests.specdec.server.running import Served

PATH = "/v1/score_choices"
PROMPT = "a restaurant in"
CHOICES = [" the centre", " the north", " town"]


def offline(server: Served, prompt: Any, choices: Any) -> list[dict[str, Any]]:
    (output,) = server.offline.generate([prompt], SamplingParams(choices=choices), use_tqdm=False)
    return [
        {
            "token_ids": score.token_ids,
            "token_logprobs": pytest.approx(score.logprobs, abs=1e-9),
            "cumulative_logprob": pytest.approx(score.cumulative_logprob, abs=1e-9),
            "normalized_logprob": pytest.approx(score.normalized_logprob, abs=1e-9),
        }
        for score in output.choices or []
    ]


def test_scores_are_those_of_llm(server: Served) -> None:
    status, headers, reply = server.send("POST", PATH, {"model": "tiny", "prompt": PROMPT, "choices": CHOICES})
    assert status == 200
    assert reply["id"] == f"score-{headers['x-request-id']}"
    assert (reply["object"], reply["model"]) == ("choice_scores", "tiny")
    expected = offline(server, PROMPT, CHOICES)
    assert reply["choices"] == [
        {"index": index, "text": text, **own} for index, (text, own) in enumerate(zip(CHOICES, expected, strict=True))
    ]
    tokens = len(server.offline.get_tokenizer()(PROMPT)["input_ids"]) + sum(len(own["token_ids"]) for own in expected)
    details = {"cached_tokens": 0}
    counts = {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
    assert reply["usage"] == {**counts, "prompt_tokens_details": details}
    server.wait_until_idle()


def test_prompts_and_choices_as_tokens_and_conversations(server: Served) -> None:
    ids = [[5, 6], [5, 7, 8], [9]]
    reply = server.send("POST", PATH, {"prompt": [5, 6, 7], "choices": ids})[2]
    expected = offline(server, [5, 6, 7], ids)
    assert [{key: one[key] for key in own} for one, own in zip(reply["choices"], expected, strict=True)] == expected
    assert [one["text"] for one in reply["choices"]] == [server.offline.get_tokenizer().decode(one) for one in ids]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I am"}]
    body = {"messages": messages, "choices": CHOICES, "continue_final_message": True, "add_generation_prompt": False}
    reply = server.send("POST", PATH, body)[2]
    prompt = server.offline.chat_prompt(messages, continue_final_message=True, add_generation_prompt=False)
    expected = offline(server, prompt, CHOICES)
    assert [{key: one[key] for key in own} for one, own in zip(reply["choices"], expected, strict=True)] == expected


@pytest.mark.parametrize(
    ("more", "param", "message"),
    [
        ({"temperature": 0.5}, "temperature", "temperature is not supported; choices are scored and nothing is gen"),
        ({"max_tokens": 1}, "max_tokens", "max_tokens is not supported"),
        ({"stream": True}, "stream", "stream is not supported"),
        ({"choices": []}, "choices", "choices is []"),
        ({"choices": ["a", ""]}, "choices", "choices holds an empty one"),
        ({"choices": [[5], [10**6]]}, "choices", "choices holds 1000000; token ids lie between 0 and"),
        ({"choices": ["a"] * 3000}, "choices", "choices holds 3000; at most 2048 are allowed"),
        ({"choices": ["a" * 9000]}, "choices", "choices holds one of"),
        ({"choices": "a"}, "choices", "choices: "),
        ({"messages": [{"role": "user", "content": "a"}]}, "prompt", "give either prompt or messages"),
        ({"prompt": None}, "prompt", "give either prompt or messages"),
        ({"prompt": []}, "prompt", "the prompt is empty"),
        (
            {"prompt": "a" * 9000, "choices": ["a"] * 2000},
            "prompt",
            "the prompt has 9000 characters, and with 2000 choices 18002000; at most 16777216 are allowed",
        ),
        ({"model": "gpt"}, "model", "the model 'gpt' is not served"),
    ],
)
def test_wrong_requests_are_refused_by_name(server: Served, more: dict[str, Any], param: str, message: str) -> None:
    status, _, reply = server.send("POST", PATH, {"prompt": PROMPT, "choices": CHOICES, **more})
    assert status == (404 if param == "model" else 400)
    assert reply["error"]["param"] == param
    assert reply["error"]["message"].startswith(message)


def test_prompt_tokens_are_counted(server: Served) -> None:
    def counted() -> float:
        page = server.send("GET", "/metrics")[2].decode()
        (line,) = [line for line in page.splitlines() if line.startswith("vllm:prompt_tokens_total{")]
        return float(line.rpartition(" ")[2])

    before = counted()
    server.send("POST", PATH, {"prompt": [5, 6, 7], "choices": [[8]]})
    assert counted() - before == 3
