"""Bodies of requests: errors of long lists, and fields for the parameters of the engine."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from specdec import SamplingParams
from specdec.kernels.types.settings import settings_of
from specdec.openai.chat_request import ChatRequest
from specdec.openai.completion_request import CompletionRequest
from specdec.openai.operation_requests import DetokenizeRequest, ScoringRequest
from specdec.openai.responses_request import ResponsesRequest
from specdec.openai.sampling_fields import SamplingFields

TALK = [{"role": "user", "content": "a"}]
WRONG: list[tuple[type[BaseModel], dict[str, Any]]] = [
    *(
        (CompletionRequest, {"prompt": "a", name: ["a", None] * 1000})
        for name in ("bad_words", "stop", "stop_token_ids", "allowed_token_ids")
    ),
    (CompletionRequest, {"prompt": ["a", 1] * 1000}),
    (CompletionRequest, {"prompt": [["a"], [1]] * 1000}),
    (CompletionRequest, {"prompt": "a", "logit_bias": {str(number): None for number in range(1000)}}),
    (CompletionRequest, {"prompt": "a", "structured_outputs": {"choice": [1] * 1000}}),
    (ChatRequest, {"messages": [{}] * 1000}),
    (ChatRequest, {"messages": [{"role": "user", "content": [1] * 1000}]}),
    (ChatRequest, {"messages": [{"role": "user", "tool_calls": [1] * 1000}]}),
    (ChatRequest, {"messages": TALK, "tools": [{}] * 1000}),
    (ChatRequest, {"messages": TALK * 20_000}),
    (ResponsesRequest, {"input": [1] * 1000}),
    (ResponsesRequest, {"input": "a", "tools": [{}] * 1000}),
    (ResponsesRequest, {"input": "a", "include": [1] * 1000}),
    (ResponsesRequest, {"input": "a", "metadata": {str(number): 1 for number in range(1000)}}),
    (ScoringRequest, {"choices": [1] * 1000}),
    (DetokenizeRequest, {"tokens": ["a"] * 1000}),
]


@pytest.mark.parametrize(("model", "body"), WRONG, ids=lambda value: str(value)[:60])
def test_a_list_of_wrong_values_is_few_errors(model: type[BaseModel], body: dict[str, Any]) -> None:
    """A million of them took a minute to describe."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() <= 8


def test_requests_have_every_sampling_parameter() -> None:
    # `logprobs` is a number in one API and a flag in the other; OpenAI has `prediction` in chats alone. Choices have a
    # route of their own. Answers are text. The server itself keeps special tokens that are tags of tool calls.
    others = {"logprobs", "prediction", "choices", "detokenize", "output_kind", "kept_special_tokens"}
    assert set(settings_of(SamplingParams)) - set(SamplingFields.model_fields) == others
