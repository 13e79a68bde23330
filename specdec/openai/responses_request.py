"""Body of `/v1/responses`, as far as it is about text and functions."""

import json
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from specdec.core.structured_outputs import StructuredOutputsParams
from specdec.openai.chat_request import Content, ReasoningEffort, TemplateArguments, content_parts, content_text
from specdec.openai.errors import ApiError
from specdec.openai.request_model import ListOf, Objects, RequestModel, Texts
from specdec.openai.sampling_fields import Int, TextFormat, check_logprobs
from specdec.openai.tool_fields import ToolFields

LOGPROBS = "message.output_text.logprobs"
FUNCTION = "function"
_ITEMS = (None, "message", "function_call", "function_call_output", "reasoning", "item_reference", "compaction")
# An item of Codex, which brings further tools.
TOOL_ITEM = "additional_tools"
_CUSTOM_ITEMS = ("custom_tool_call", "custom_tool_call_output")


class ResponseTool(RequestModel):
    """A tool of the request. Those of type function are offered to the model, others left out."""

    type: str
    name: str | None = None

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if self.type == FUNCTION and self.name is None:
            raise ValueError("a function has no name; give it")
        return self


class InputItem(RequestModel):
    """A message, a call of a function or of a custom tool, its result, or an item that is left out."""

    type: str | None = None
    role: str | None = None
    content: Content | None = None
    summary: Content | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: Content | None = None
    tools: Objects[ResponseTool] | None = None

    @property
    def is_left_out(self) -> bool:
        """Return whether it is of another type and has no text, such as the search of another server."""
        texts = (self.content, self.summary, self.arguments, self.input, self.output)
        return self.type not in (*_ITEMS, *_CUSTOM_ITEMS) and not any(texts)

    def message(self) -> dict[str, Any]:
        """Return the item as a message of a chat.

        Raises:
            ApiError: an item of another kind, or one that lacks a field.
        """
        match self.type:
            case None | "message" if self.role is not None:
                return {"role": self.role, "content": content_parts(self.content)}
            case "function_call" | "custom_tool_call" if self.name is not None:
                # Chat templates know calls of functions alone.
                is_custom = self.type == "custom_tool_call"
                arguments = json.dumps({"input": self.input or ""}) if is_custom else self.arguments
                function = {"name": self.name, "arguments": arguments}
                call = {"id": self.call_id, "type": "function", "function": function}
                return {"role": "assistant", "tool_calls": [call]}
            case "function_call_output" | "custom_tool_call_output":
                return {"role": "tool", "content": content_parts(self.output), "tool_call_id": self.call_id}
            case "reasoning":
                return {
                    "role": "assistant",
                    "reasoning_content": content_text(self.content or self.summary, "\n", "input"),
                }
        message = f"an input item is of type {self.type!r:.60}; known are messages with a role, function_call, "
        message += "custom_tool_call (each with a name), their outputs, and reasoning"
        raise ApiError(400, message, param="input")


class ReasoningOptions(RequestModel):
    """OpenAI's `reasoning` object."""

    effort: ReasoningEffort | None = None


class TextOptions(RequestModel):
    """Form of the answer."""

    format: TextFormat | None = None


class ResponsesRequest(TemplateArguments, ToolFields):
    """OpenAI's fields, and vLLM's sampling parameters besides."""

    PROMPT_FIELD: ClassVar[str] = "input"
    LIMIT_FIELD: ClassVar[str] = "max_output_tokens"
    input: str | Objects[InputItem]
    instructions: str | None = None
    max_output_tokens: Int | None = None
    text: TextOptions | None = None
    tools: Objects[ResponseTool] | None = None
    reasoning: ReasoningOptions | None = None
    top_logprobs: Int | None = None
    include: ListOf[str] | None = None
    metadata: Texts | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None

    def ignored(self) -> list[str]:
        """Describe ignored parts for the log: unknown fields, tools other than functions, items without text."""
        tools = {tool.type for tool in self.all_tools} - {FUNCTION}
        items = [] if isinstance(self.input, str) else self.input
        kinds = {str(item.type) for item in items if item.is_left_out} - {TOOL_ITEM}
        return [
            *super().ignored(),
            *(f"tools of type {kind!r:.50}" for kind in sorted(tools)),
            *(f"input items of type {kind!r:.50}" for kind in sorted(kinds)),
        ]

    @property
    def effort(self) -> ReasoningEffort | None:
        """Reasoning effort; None for the chat template's default."""
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def all_tools(self) -> list[ResponseTool]:
        """The tools of the request and of its items; those of namespaces are not among them."""
        items = [] if isinstance(self.input, str) else self.input
        return [*(self.tools or ()), *(tool for item in items if item.type == TOOL_ITEM for tool in item.tools or ())]

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The functions among the tools, as they were given."""
        return [tool.model_dump() for tool in self.all_tools if tool.type == FUNCTION]

    @property
    def offered(self) -> list[dict[str, Any]]:
        return [{key: value for key, value in each.items() if key != "type"} for each in self.functions]

    @property
    def num_logprobs(self) -> int | None:
        """Number of most probable tokens to show per token, None without log-probabilities."""
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None

    def chat_messages(self) -> list[dict[str, Any]]:
        """Return the conversation as messages of a chat.

        Raises:
            ApiError: an item that is not supported, or none.
        """
        if not self.input:
            raise ApiError(400, "input is empty; give text or at least one message", param="input")
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*system, {"role": "user", "content": self.input}]
        return [*system, *_joined_turns(item.message() for item in self.input if not item.is_left_out)]

    def template_arguments(self) -> dict[str, Any]:
        """Return what the chat template gets beside the messages.

        Raises:
            ApiError: an argument that requests may not set.
        """
        given = self.own_arguments()
        shown = [{key: value for key, value in each.items() if key != "strict"} for each in self.shown_functions()]
        # Chat templates know the form of chat completions.
        tools = [{"type": "function", "function": function} for function in shown]
        return given | ({"tools": tools} if tools else {})

    @property
    def shown_choice(self) -> str | dict[str, Any]:
        """The choice of tools, as the answer repeats it."""
        calls = self.calls
        if calls.names is None:
            return calls.mode
        tools = [{"type": "function", "name": name} for name in calls.names]
        return tools[0] if calls.mode == "named" else {"type": "allowed_tools", "mode": calls.mode, "tools": tools}

    @property
    def text_format(self) -> dict[str, Any]:
        """The form of the answer, as the answer repeats it."""
        if self.text is None or self.text.format is None:
            return {"type": "text"}
        return self.text.format.model_dump(by_alias=True, exclude_none=True)

    @property
    def structure_field(self) -> str:
        """The field that says which form the output follows."""
        has_format = self.text is not None and self.text.format is not None and not self.calls.is_forced
        return "text.format" if has_format else super().structure_field

    def structure(self) -> StructuredOutputsParams | None:
        """Return the form that the output follows, None for any."""
        own = None if self.text is None or self.text.format is None else self.text.format.structure("text.format")
        return super().structure() if own is None else own

    def check_supported(self, most_logprobs: int) -> None:
        """See `SamplingFields.check_supported`."""
        for name in ("previous_response_id", "conversation", "prompt", "background"):
            if getattr(self, name):
                raise self.refuse(name, "answers are not stored; send the whole conversation as input")
        for name in ("trace", "return_token_ids", "return_meta_info"):
            if getattr(self, name):
                raise self.refuse(name, "use /v1/chat/completions")
        if self.prompt_logprobs is not None:
            raise self.refuse("prompt_logprobs", "use /v1/chat/completions")
        if self.stream_options is not None and self.stream_options.continuous_usage_stats:
            raise self.refuse("stream_options", "the usage comes with the last event; leave out continuous_usage_stats")
        if self.n not in (None, 1):
            raise self.refuse("n", "a response is one answer")
        super().check_supported(most_logprobs)
        check_logprobs(self.top_logprobs, most_logprobs, "top_logprobs")


def _joined_turns(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which all items of one turn of the assistant, which follow each other, are one message."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "assistant" or not turns or turns[-1]["role"] != "assistant":
            turns.append(message)
            continue
        turn = turns[-1]
        for key in ("content", "tool_calls"):
            turn[key] = [*turn.get(key, ()), *message.get(key, ())]
        if reasoning := [text for each in (turn, message) if (text := each.get("reasoning_content"))]:
            turn["reasoning_content"] = "\n".join(reasoning)
    # Reasoning alone is no answer.
    return [turn for turn in turns if turn.get("content") or turn.get("tool_calls") or "reasoning_content" not in turn]
