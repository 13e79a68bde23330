"""The answer of `/v1/messages`, whole or in parts, in Anthropic's shapes."""

import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from msgspec import Struct, field

from specdec.core.outputs import RequestOutput
from specdec.core.sampling_params import SamplingParams
from specdec.openai.chat_request import ChatRequest
from specdec.openai.connection import event
from specdec.openai.errors import ApiError, error_reply
from specdec.openai.served_model import ServedModel
from specdec.tool_calls.tagged_calls import Item, Thought
from specdec.tool_calls.tool_call_reader import CallArguments, CallStart, json_value

Event = dict[str, Any]


class TextBlock(Struct, tag="text", tag_field="type"):
    """Text of the answer."""

    text: str = ""


class ThinkingBlock(Struct, tag="thinking", tag_field="type"):
    """The model's thinking, without a signature."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(Struct, tag="tool_use", tag_field="type"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any] = field(default_factory=dict)


class ThinkingDetails(Struct):
    """Parts of the output."""

    thinking_tokens: int = 0


class MessageUsage(Struct):
    """Counts of tokens; those of the prompt are the sum of three."""

    input_tokens: int
    output_tokens: int = 0
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    output_tokens_details: ThinkingDetails = field(default_factory=ThinkingDetails)


class MessageReply(Struct, kw_only=True):
    """Answer of `/v1/messages`."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock] = field(default_factory=list)
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class InputTokens(Struct):
    """Answer of `/v1/messages/count_tokens`."""

    input_tokens: int


class MessagesAnswer:
    """Makes the answer to a request of its states. The whole answer is what the events of a streamed one add up to."""

    def __init__(self, answer_id: str, served: ServedModel, body: ChatRequest, params: SamplingParams) -> None:
        self._served, self._params = served, params
        self._parser = served.answer_parser(body, params)
        self._reply = MessageReply(id=answer_id, model=served.answer_name(body.model), usage=MessageUsage(0))
        self._has_begun, self._is_open, self._arguments = False, False, ""

    def whole(self, states: Sequence[RequestOutput]) -> MessageReply:
        """Return the answer made of the last state."""
        (state,) = states
        for _ in self._events(state, state.outputs[0].text):
            pass
        return self._reply

    async def events(self, states: AsyncGenerator[tuple[int, RequestOutput]]) -> AsyncGenerator[bytes]:
        """Yield the answer in parts, as server-sent events."""
        async with aclosing(states) as news:
            async for _, state in news:
                text = "".join(segment.text for segment in state.outputs[0].segments)
                if parts := [event(each, each["type"]) for each in self._events(state, text)]:
                    yield b"".join(parts)

    def error_event(self, error: ApiError) -> bytes:
        """Return the event that ends a stream after an error."""
        return event({"type": "error", "error": error_reply(error).error}, "error")

    def _events(self, state: RequestOutput, text: str) -> Iterator[Event]:
        """Add new text to the answer; yield its events."""
        output, reply = state.outputs[0], self._reply
        cached = state.num_cached_tokens or 0
        thinking = ThinkingDetails(self._served.num_thinking(self._params, state.outputs))
        count = len(state.prompt_token_ids)
        reply.usage = MessageUsage(count - cached, len(output.token_ids), cached, 0, thinking)
        if not self._has_begun:
            self._has_begun = True
            yield {"type": "message_start", "message": reply}
        items = self._parser.push(text)
        if output.finish_reason is not None:
            items += self._parser.finish()
        for item in items:
            yield from self._add(item)
        if output.finish_reason is None:
            return
        yield from self._close()
        calls = any(isinstance(block, ToolUseBlock) for block in reply.content)
        stopped = "tool_use" if calls else "stop_sequence" if isinstance(output.stop_reason, str) else "end_turn"
        # An answer that was aborted may be continued.
        reply.stop_reason = {"stop": stopped, "length": "max_tokens"}.get(output.finish_reason, "pause_turn")
        reply.stop_sequence = output.stop_reason if isinstance(output.stop_reason, str) else None
        delta = {"stop_reason": reply.stop_reason, "stop_sequence": reply.stop_sequence}
        yield {"type": "message_delta", "delta": delta, "usage": reply.usage}
        yield {"type": "message_stop"}

    def _add(self, item: Item) -> Iterator[Event]:
        block = self._reply.content[-1] if self._is_open else None
        if isinstance(item, CallStart):
            yield from self._open(ToolUseBlock(f"toolu_{secrets.token_hex(12)}", item.name))
        elif isinstance(item, CallArguments):
            self._arguments += item.text
            yield self._delta({"type": "input_json_delta", "partial_json": item.text})
        elif isinstance(item, Thought):
            if not isinstance(block, ThinkingBlock):
                block = ThinkingBlock()
                yield from self._open(block)
            block.thinking += item.text
            yield self._delta({"type": "thinking_delta", "thinking": item.text})
        else:
            if not isinstance(block, TextBlock):
                block = TextBlock()
                yield from self._open(block)
            block.text += item
            yield self._delta({"type": "text_delta", "text": item})

    @property
    def _index(self) -> int:
        return len(self._reply.content) - 1

    def _delta(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _open(self, block: TextBlock | ThinkingBlock | ToolUseBlock) -> Iterator[Event]:
        yield from self._close()
        self._reply.content.append(block)
        self._is_open, self._arguments = True, ""
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> Iterator[Event]:
        """End the open block, if there is one."""
        if not self._is_open:
            return
        self._is_open = False
        block = self._reply.content[-1]
        if isinstance(block, ToolUseBlock):
            block.input = _arguments(self._arguments)
        yield {"type": "content_block_stop", "index": self._index}


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call; none where the answer was cut off within them."""
    found = json_value(text)
    return found if isinstance(found, dict) else {}
