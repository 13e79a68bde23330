"""The answer of `/v1/responses`, whole or in parts, in OpenAI's shapes."""

import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from msgspec import UNSET, Struct, UnsetType, field

from specdec.core.outputs import CompletionOutput, RequestOutput
from specdec.core.sampling_params import SamplingParams
from specdec.openai.connection import event
from specdec.openai.errors import ApiError, error_reply
from specdec.openai.logprob_replies import chat_logprobs
from specdec.openai.replies import TokenLogprob, now
from specdec.openai.responses_request import ResponsesRequest
from specdec.openai.served_model import ServedModel
from specdec.openai.speculation_replies import SglExt, SpeculationMetrics
from specdec.tool_calls.tagged_calls import Thought
from specdec.tool_calls.tool_call_reader import CallArguments, CallStart

Event = dict[str, Any]


class OutputText(Struct):
    """Text of a message."""

    text: str = ""
    type: str = "output_text"
    annotations: list[None] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


class OutputMessage(Struct, tag="message", tag_field="type"):
    """A message of the assistant."""

    id: str
    status: str = "in_progress"
    role: str = "assistant"
    content: list[OutputText] = field(default_factory=list)


class ReasoningText(Struct):
    """Text of the model's thinking."""

    text: str = ""
    type: str = "reasoning_text"


class OutputReasoning(Struct, tag="reasoning", tag_field="type"):
    """The model's thinking. It is given as it is, so there is no summary."""

    id: str
    status: str = "in_progress"
    summary: list[None] = field(default_factory=list)
    content: list[ReasoningText] = field(default_factory=list)


class OutputCall(Struct, tag="function_call", tag_field="type"):
    """A call of a function."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: str = "in_progress"


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputDetails(Struct):
    """Parts of the prompt: tokens found in the prefix cache. What is written to it is not counted per request."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(Struct):
    """Parts of the output."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct):
    """Counts of tokens."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails = field(default_factory=InputDetails)
    output_tokens_details: OutputDetails = field(default_factory=OutputDetails)


class ResponseReply(Struct, kw_only=True):
    """Answer of `/v1/responses`.

    Attributes:
        status: in_progress, completed, incomplete (the limit of tokens), or failed.
    """

    id: str
    object: str = "response"
    created_at: int
    status: str = "in_progress"
    model: str
    output: list[OutputItem] = field(default_factory=list)
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    top_logprobs: int
    max_output_tokens: int | None
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    text: dict[str, dict[str, Any]]
    truncation: str = "disabled"
    store: bool = False
    background: bool = False
    previous_response_id: None = None
    usage: ResponseUsage | None = None
    metrics: SpeculationMetrics | UnsetType | None = UNSET
    sglext: SglExt | UnsetType | None = UNSET


class ResponsesAnswer:
    """Makes the answer to a request of its states. The whole answer is what the events of a streamed one add up to."""

    def __init__(self, answer_id: str, served: ServedModel, body: ResponsesRequest, params: SamplingParams) -> None:
        self._body, self._served, self._params = body, served, params
        self._parser = served.answer_parser(body, params)
        self._reply = ResponseReply(
            id=answer_id,
            created_at=now(),
            model=served.answer_name(body.model),
            instructions=body.instructions,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            temperature=params.temperature,
            top_p=params.top_p,
            top_logprobs=body.top_logprobs or 0,
            max_output_tokens=body.max_output_tokens,
            tool_choice=body.shown_choice,
            text={"format": body.text_format},
            truncation=body.truncation or "disabled",
            tools=[{"strict": False, "parameters": {}, **function} for function in body.functions],
        )
        self._open: OutputItem | None = None
        self._num_tokens = self._sequence = 0

    def whole(self, states: Sequence[RequestOutput]) -> ResponseReply:
        """Return the answer made of the last state."""
        (state,) = states
        output = state.outputs[0]
        for _ in self._text(output.text, output):
            pass
        for _ in self._end(state):
            pass
        return self._reply

    async def events(self, states: AsyncGenerator[tuple[int, RequestOutput]]) -> AsyncGenerator[bytes]:
        """Yield the answer in parts, as server-sent events."""
        async with aclosing(states) as news:
            async for _, state in news:
                output = state.outputs[0]
                parts: list[bytes] = []
                if self._sequence == 0:
                    parts = [self._encoded(self._status(kind)) for kind in ("created", "in_progress")]
                text = "".join(segment.text for segment in output.segments)
                parts += [self._encoded(each) for each in self._text(text, output)]
                if state.finished:
                    parts += [self._encoded(each) for each in self._end(state)]
                if parts:
                    yield b"".join(parts)

    def error_event(self, error: ApiError) -> bytes:
        """Return the event that ends a stream after an error."""
        body = error_reply(error).error
        return self._encoded({"type": "error", "code": body.code, "message": body.message, "param": body.param})

    def _encoded(self, body: Event) -> bytes:
        numbered = {**body, "sequence_number": self._sequence}
        self._sequence += 1
        return event(numbered, body["type"])

    def _status(self, kind: str) -> Event:
        return {"type": f"response.{kind}", "response": self._reply}

    def _text(self, text: str, output: CompletionOutput) -> Iterator[Event]:
        """Add new text to the answer; yield its events."""
        items = self._parser.push(text)
        if output.finish_reason is not None:
            items += self._parser.finish()
        for item in items:
            if isinstance(item, CallStart):
                call_id = f"call_{secrets.token_hex(12)}"
                yield from self._begin(OutputCall(f"fc_{secrets.token_hex(12)}", call_id, item.name))
            elif isinstance(item, CallArguments):
                assert isinstance(self._open, OutputCall)
                self._open.arguments += item.text
                yield {"type": "response.function_call_arguments.delta", **self._place, "delta": item.text}
            elif isinstance(item, Thought):
                yield from self._think(item.text)
            else:
                yield from self._delta(item, self._logprobs(output))

    def _logprobs(self, output: CompletionOutput) -> list[TokenLogprob]:
        """Return the log-probabilities of tokens of the answer that are not sent yet."""
        count = self._body.num_logprobs
        if count is None or output.logprobs is None:
            return []
        first = max(self._num_tokens, self._served.answer_place(self._params, output))
        self._num_tokens = len(output.token_ids)
        return chat_logprobs(output.token_ids[first:], output.logprobs[first:], count).content

    @property
    def _place(self) -> Event:
        """Place of the open item, the last one so far."""
        assert self._open is not None
        place: Event = {"item_id": self._open.id, "output_index": len(self._reply.output) - 1}
        return place if isinstance(self._open, OutputCall) else place | {"content_index": 0}

    def _added(self, item: OutputItem, kind: str) -> Event:
        return {"type": f"response.output_item.{kind}", "output_index": len(self._reply.output) - 1, "item": item}

    def _begin(self, item: OutputItem) -> Iterator[Event]:
        """End the open item, and open another; a message and thinking have one part of content."""
        yield from self._close("completed")
        self._open = item
        self._reply.output.append(item)
        yield self._added(item, "added")
        if isinstance(item, OutputMessage):
            item.content.append(OutputText())
        elif isinstance(item, OutputReasoning):
            item.content.append(ReasoningText())
        if not isinstance(item, OutputCall):
            yield {"type": "response.content_part.added", **self._place, "part": item.content[0]}

    def _delta(self, text: str, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        message = self._open
        if not isinstance(message, OutputMessage):
            message = OutputMessage(f"msg_{secrets.token_hex(12)}")
            yield from self._begin(message)
        part = message.content[0]
        part.text += text
        part.logprobs += logprobs
        yield {"type": "response.output_text.delta", **self._place, "delta": text, "logprobs": logprobs}

    def _think(self, text: str) -> Iterator[Event]:
        item = self._open
        if not isinstance(item, OutputReasoning):
            item = OutputReasoning(f"rs_{secrets.token_hex(12)}")
            yield from self._begin(item)
        item.content[0].text += text
        yield {"type": "response.reasoning_text.delta", **self._place, "delta": text}

    def _close(self, status: str) -> Iterator[Event]:
        """End the open item, if there is one."""
        item = self._open
        if item is None:
            return
        item.status = status
        if isinstance(item, OutputCall):
            done: Event = {"arguments": item.arguments, "name": item.name}
            yield {"type": "response.function_call_arguments.done", **self._place, **done}
        else:
            part = item.content[0]
            done = {"text": part.text, **({"logprobs": part.logprobs} if isinstance(part, OutputText) else {})}
            yield {"type": f"response.{part.type}.done", **self._place, **done}
            yield {"type": "response.content_part.done", **self._place, "part": part}
        yield self._added(item, "done")
        self._open = None

    def _end(self, state: RequestOutput) -> Iterator[Event]:
        """End the answer."""
        output, reply = state.outputs[0], self._reply
        # An answer has a message even if it is empty. The end token has a log-probability and no text.
        left = self._logprobs(output)
        if not reply.output or (left and isinstance(self._open, OutputMessage)):
            yield from self._delta("", left)
        reason = output.finish_reason
        reply.status = {"stop": "completed", "length": "incomplete"}.get(reason or "", "failed")
        yield from self._close("completed" if reason == "stop" else "incomplete")
        if reply.status == "incomplete":
            reply.incomplete_details = {"reason": "max_output_tokens"}
        elif reply.status == "failed":
            reply.error = {"code": "server_error", "message": "the request was aborted"}
        prompt, generated = len(state.prompt_token_ids), len(output.token_ids)
        cached = InputDetails(state.num_cached_tokens or 0)
        thinking = OutputDetails(self._served.num_thinking(self._params, state.outputs))
        reply.usage = ResponseUsage(prompt, generated, prompt + generated, cached, thinking)
        reply.metrics, reply.sglext = self._served.speculation_figures(self._body, state.outputs)
        yield self._status(reply.status)
