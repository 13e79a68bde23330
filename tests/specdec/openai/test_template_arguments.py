"""What the chat template gets for a request's effort of reasoning."""

from typing import Any

import pytest

from specdec.openai.chat_request import ChatRequest
from specdec.openai.responses_request import ResponsesRequest

OFF = {"enable_thinking": False}


@pytest.mark.parametrize(
    ("effort", "given", "expected"),
    [
        (None, {}, {}),
        ("low", {}, {"reasoning_effort": "low"}),
        ("xhigh", {"a": 1}, {"reasoning_effort": "xhigh", "a": 1}),
        ("none", {}, {"reasoning_effort": "none", **OFF}),
        ("none", {"enable_thinking": True}, {"reasoning_effort": "none", "enable_thinking": True}),
        ("high", {"reasoning_effort": "low", **OFF}, {"reasoning_effort": "low", **OFF}),
    ],
)
def test_an_effort_is_a_variable_of_the_template(
    effort: str | None, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    more = {"chat_template_kwargs": given}
    chat = {"messages": [{"role": "user", "content": "a"}], "reasoning_effort": effort}
    found = ChatRequest.model_validate({**chat, **more}).template_arguments()
    assert found == {"add_generation_prompt": True, **expected}
    response = {"input": "a", "reasoning": {"effort": effort}}
    assert ResponsesRequest.model_validate({**response, **more}).template_arguments() == expected
