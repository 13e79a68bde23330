"""Predicted Outputs through OpenAI's package: fewer steps, the same answer, counts of what came true."""

from typing import Any

import pytest
from openai import OpenAI

from specdec import SamplingParams
from tests.specdec.server.running import Served

pytestmark = pytest.mark.slow

TALK: Any = [{"role": "user", "content": "A taxi to Davis."}]
SAMPLED: dict[str, Any] = {"seed": 5, "max_tokens": 60}


def answer(server: Served, **more: Any) -> Any:
    (found,) = server.offline.chat(TALK, SamplingParams(**SAMPLED, ignore_eos=True, **more), use_tqdm=False)
    return found


def as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text[:7]}, {"type": "text", "text": text[7:]}]


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", [str, as_parts])
@pytest.mark.parametrize("n", [1, 2])
def test_the_answer_and_the_counts_are_those_of_the_offline_api(
    server: Served, client: OpenAI, form: Any, stream: bool, n: int
) -> None:
    plain = answer(server, n=n)
    # An edit: some text is gone, and some is new.
    text = plain.outputs[0].text
    text = text[:20] + "ab" + text[24:]
    expected = answer(server, n=n, prediction=text)
    accepted, rejected = (
        sum(getattr(one.stats, name) for one in expected.outputs)
        for name in ("accepted_prediction", "rejected_prediction")
    )
    assert server.offline.tokenizer is not None
    assert accepted + rejected == n * len(server.offline.tokenizer.encode(text, add_special_tokens=False))
    assert accepted > rejected > 0 or n == 2
    given: Any = {"prediction": {"type": "content", "content": form(text)}, "n": n, **SAMPLED}
    given |= {"extra_body": {"ignore_eos": True, "return_token_ids": True}}
    if stream:
        options: Any = {"include_usage": True}
        parts = list(
            client.chat.completions.create(model="tiny", messages=TALK, stream=True, stream_options=options, **given)
        )
        usage, tokens = parts[-1].usage, [list[int]() for _ in range(n)]
        for choice in (choice for part in parts for choice in part.choices):
            tokens[choice.index] += (choice.model_extra or {}).get("token_ids") or []
    else:
        whole = client.chat.completions.create(model="tiny", messages=TALK, **given)
        usage, tokens = whole.usage, [(choice.model_extra or {})["token_ids"] for choice in whole.choices]
    assert tokens == [list(one.token_ids) for one in plain.outputs]
    assert usage is not None
    assert usage.completion_tokens == 60 * n
    details = usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (accepted, rejected)


@pytest.mark.long
def test_the_right_prediction_saves_steps_and_a_request_without_one_has_no_details(
    server: Served, client: OpenAI
) -> None:
    # Token ids, as the text of this model's answers has other tokens.
    tokens = answer(server).token_ids
    predicted = answer(server, prediction=tokens).stats
    assert predicted.steps < answer(server).stats.steps / 2
    assert (predicted.accepted_prediction, predicted.rejected_prediction) == (60, 0)
    usage = client.chat.completions.create(model="tiny", messages=TALK, **SAMPLED).usage
    assert usage is not None
    assert usage.completion_tokens_details is None
    nothing: Any = {"type": "content", "content": ""}
    usage = client.chat.completions.create(model="tiny", messages=TALK, prediction=nothing, **SAMPLED).usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.accepted_prediction_tokens == 0
    assert usage.completion_tokens_details.rejected_prediction_tokens == 0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("text", "prediction: Input should be a valid dictionary or object to extract fields from"),
        ({"type": "content"}, "prediction.content: Field required"),
        ({"type": "tokens", "content": "a"}, "prediction.type: Input should be 'content'"),
        (
            {"type": "content", "content": [{"type": "image_url"}]},
            "a content part is of type 'image_url'; only text is supported",
        ),
        ({"type": "content", "content": 3}, "prediction.content: Input should be a valid string"),
    ],
)
def test_another_value_is_refused_in_one_line(server: Served, value: Any, message: str) -> None:
    body = {"messages": TALK, "prediction": value}
    status, _, reply = server.send("POST", "/v1/chat/completions", body)
    assert status == 400
    assert message in reply["error"]["message"]
    assert "\n" not in reply["error"]["message"]
    assert reply["error"]["param"] == "prediction"
