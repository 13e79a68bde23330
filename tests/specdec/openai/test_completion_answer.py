"""Answers of completions that no engine gives in tests at will."""

import asyncio

from specdec.async_engine.messages import ReplyTo
from specdec.async_engine.request_stream import RequestStream
from specdec.core.commands import Add
from specdec.openai.completion_answer import CompletionAnswer
from specdec.openai.completion_request import CompletionRequest
from specdec.openai.served_model import ServedModel
from specdec.tool_calls.tool_parsers import PlainText


def test_an_aborted_request_echoes_a_prompt_that_is_not_scored() -> None:
    body = CompletionRequest(prompt="ab", echo=True, logprobs=1)
    params = body.sampling_params({}, max_tokens=4, logprobs=1, prompt_logprobs=1)
    stream = RequestStream("0", "ab", add := Add([3, 4], params))
    stream.receive(ReplyTo.of(0, True, add.aborted()))
    state = asyncio.run(stream.read())
    served = ServedModel(["tiny"], None, PlainText, None, "none", 3)
    answer = CompletionAnswer("0", served, body, ["ab"], [[3, 4]], params)
    (choice,) = answer.whole([state]).choices
    assert (choice.text, choice.finish_reason) == ("ab", "abort")
    assert choice.logprobs is not None
    assert (choice.logprobs.tokens, choice.logprobs.token_logprobs) == (["token_id:3", "token_id:4"], [None, None])
