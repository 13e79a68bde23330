"""The answer of `/v1/chat/completions`, whole or in parts."""

import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from msgspec import UNSET

from specdec.core.outputs import CompletionOutput, RequestOutput, SpeculationStats
from specdec.core.sampling_params import SamplingParams
from specdec.core.step_report import StepReporter
from specdec.openai.chat_request import ChatRequest
from specdec.openai.connection import DONE, error_event, event
from specdec.openai.logprob_replies import chat_logprobs, prompt_logprobs
from specdec.openai.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    CompletionTokensDetails,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
    now,
)
from specdec.openai.served_model import ServedModel
from specdec.openai.speculation_replies import meta_info
from specdec.tool_calls.tagged_calls import Item, Thought, ToolParser
from specdec.tool_calls.tool_call_reader import CallArguments, CallStart

ASSISTANT = "assistant"


@dataclass
class _ChatProgress:
    """Progress of a choice that is being sent.

    Attributes:
        steps: reports the steps that are not sent yet.
        tokens: generated tokens whose log-probabilities are sent.
        calls: number of tool calls.
        has_begun, has_ended: whether its first and its last part are sent.
    """

    parser: ToolParser
    steps: StepReporter
    tokens: int = 0
    calls: int = 0
    has_begun: bool = False
    has_ended: bool = False


class ChatAnswer:
    """Makes the answer to a conversation of its states."""

    error_event = staticmethod(error_event)

    def __init__(self, answer_id: str, served: ServedModel, body: ChatRequest, params: SamplingParams) -> None:
        self._id, self._served, self._body, self._created = answer_id, served, body, now()
        self._params, reporters = params, served.step_reporters(params)
        self._sent = [_ChatProgress(served.answer_parser(body, params), next(reporters)) for _ in range(params.n)]

    def whole(self, states: Sequence[RequestOutput]) -> ChatCompletion:
        """Return the answer made of the last state."""
        (state,) = states
        metrics, sglext = self._served.speculation_figures(self._body, state.outputs)
        reply = ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._served.answer_name(self._body.model),
            choices=[self._choice(output) for output in state.outputs],
            usage=self._usage(state),
            metrics=metrics,
            sglext=sglext,
        )
        self._add_prompt(reply, state)
        return reply

    def _add_prompt(self, reply: ChatCompletion | ChatChunk, state: RequestOutput) -> None:
        """Add what the request wants to see of its prompt."""
        if self._body.prompt_logprobs is not None and state.prompt_logprobs is not None:
            reply.prompt_logprobs = prompt_logprobs(state.prompt_logprobs)
        if self._body.return_token_ids:
            reply.prompt_token_ids = state.prompt_token_ids

    def _usage(self, state: RequestOutput) -> Usage:
        generated = sum(len(output.token_ids) for output in state.outputs)
        usage = Usage.of(len(state.prompt_token_ids), generated, [state])
        if self._body.prediction is not None or self._served.reasoning is not None:
            stats = SpeculationStats.total(output.stats for output in state.outputs)
            usage.completion_tokens_details = CompletionTokensDetails(
                stats.accepted_prediction,
                stats.rejected_prediction,
                self._served.num_thinking(self._params, state.outputs),
            )
        return usage

    def _choice(self, output: CompletionOutput) -> ChatChoice:
        sent = self._sent[output.index]
        items = self._shown([*sent.parser.push(output.text), *sent.parser.finish()])
        calls: list[ToolCall] = []
        for item in items:
            if isinstance(item, CallStart):
                calls.append(ToolCall(id=_call_id(), function=FunctionCall(item.name, "")))
            elif isinstance(item, CallArguments):
                calls[-1].function.arguments += item.text
        sent.calls = len(calls)
        text = "".join(item for item in items if isinstance(item, str))
        thinking = "".join(item.text for item in items if isinstance(item, Thought))
        message = ChatMessage(ASSISTANT, None if (calls or thinking) and not text else text)
        if thinking:
            message.reasoning = message.reasoning_content = thinking
        if calls:
            message.tool_calls = calls
        reason, logprobs = self._finish_reason(output, sent), self._logprobs(sent, output)
        choice = ChatChoice(output.index, message, logprobs, reason, output.stop_reason)
        choice.meta_info = meta_info(self._body.return_meta_info, output)
        if self._body.return_token_ids:
            choice.token_ids = output.token_ids
        if self._body.trace:
            choice.trace = sent.steps.new_steps(output)
        return choice

    async def events(self, states: AsyncGenerator[tuple[int, RequestOutput]]) -> AsyncGenerator[bytes]:
        """Yield the answer in parts, as server-sent events."""
        body, state, has_begun = self._body, None, False
        async with aclosing(states) as news:
            async for _, state in news:
                usage = self._usage(state) if body.continuous_usage else None
                if chunks := [self._chunk([part], usage) for output in state.outputs for part in self._parts(output)]:
                    if not has_begun:
                        has_begun = True
                        self._add_prompt(chunks[0], state)
                    yield b"".join(map(event, chunks))
        if body.include_usage and state is not None:
            last = self._chunk([], self._usage(state))
            last.metrics, last.sglext = self._served.speculation_figures(body, state.outputs)
            yield event(last)
        yield DONE

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._served.answer_name(self._body.model),
            choices=choices,
            usage=usage if self._body.include_usage else UNSET,
        )

    def _parts(self, output: CompletionOutput) -> Iterator[ChatChunkChoice]:
        """Yield what was not sent yet of a choice: its role first, its finish reason last."""
        sent, index = self._sent[output.index], output.index
        if sent.has_ended:
            return
        if not sent.has_begun:
            sent.has_begun = True
            yield ChatChunkChoice(index, ChatDelta(ASSISTANT, ""))
        items = sent.parser.push("".join(segment.text for segment in output.segments))
        if output.finish_reason is not None:
            items += sent.parser.finish()
        new_tokens = output.token_ids[sent.tokens :] if self._body.return_token_ids else []
        first = ChatChunkChoice(index, ChatDelta(content=""), self._logprobs(sent, output))
        first.token_ids = new_tokens or UNSET
        if self._body.trace:
            first.trace = sent.steps.new_steps(output)
        deltas = [self._delta(sent, item) for item in self._shown(items)]
        if deltas:
            first.delta = deltas[0]
        if deltas or new_tokens or first.logprobs is not None or first.trace:
            yield first
        for delta in deltas[1:]:
            yield ChatChunkChoice(index, delta)
        if output.finish_reason is not None:
            sent.has_ended = True
            reason = self._finish_reason(output, sent)
            last = ChatChunkChoice(index, ChatDelta(), None, reason, output.stop_reason)
            last.meta_info = meta_info(self._body.return_meta_info, output)
            yield last

    def _shown(self, items: list[Item]) -> list[Item]:
        """Return the items that the request wants to see."""
        if self._body.include_reasoning is False:
            return [item for item in items if not isinstance(item, Thought)]
        return items

    def _delta(self, sent: _ChatProgress, item: Item) -> ChatDelta:
        if isinstance(item, str):
            return ChatDelta(content=item)
        if isinstance(item, Thought):
            return ChatDelta(reasoning=item.text, reasoning_content=item.text)
        if isinstance(item, CallArguments):
            return ChatDelta(tool_calls=[ToolCallDelta(sent.calls - 1, FunctionDelta(item.text))])
        sent.calls += 1
        call = ToolCallDelta(sent.calls - 1, FunctionDelta("", item.name), _call_id(), "function")
        return ChatDelta(tool_calls=[call])

    def _finish_reason(self, output: CompletionOutput, sent: _ChatProgress) -> str | None:
        # As OpenAI and vLLM have it, a call of a named function ends as a message does.
        if not sent.calls or output.finish_reason != "stop" or self._body.calls.mode == "named":
            return output.finish_reason
        return "tool_calls"

    def _logprobs(self, sent: _ChatProgress, output: CompletionOutput) -> ChatLogprobs | None:
        """Return the log-probabilities of tokens of the answer that are not sent yet, None if there are none."""
        count, first = self._body.num_logprobs, max(sent.tokens, self._served.answer_place(self._params, output))
        sent.tokens = len(output.token_ids)
        if count is None or output.logprobs is None or first == sent.tokens:
            return None
        return chat_logprobs(output.token_ids[first:], output.logprobs[first:], count)


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
