"""Body of `/v1/messages`, Anthropic's form of a chat, and the chat that it stands for."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field, ValidationError

from specdec.openai.chat_request import ChatRequest, ReasoningEffort
from specdec.openai.errors import ApiError
from specdec.openai.request_model import ListOf, Objects, RequestModel
from specdec.openai.sampling_fields import Int

# Fields that a chat has by the same names.
_SAME = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k")
# A block of the system prompt that Claude Code changes with each request.
_BILLING = "x-anthropic-billing-header:"
# Claude Code's news of a tool that the model may call from here on: all of `tools` are offered from the start.
_ADDITION = "tool_addition"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessageBlock(RequestModel):
    """A part of a message, or of a tool's result."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: "str | Objects[MessageBlock] | None" = None


class MessageIn(RequestModel):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Objects[MessageBlock]


class ToolIn(RequestModel):
    """A tool that the model may call."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoiceIn(RequestModel):
    """Which tools the model calls."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestModel):
    """Anthropic's `thinking`: whether the model thinks, and the most tokens of it."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Int | None = None


class OutputFormat(RequestModel):
    """Schema that the answer follows."""

    type: Literal["json_schema"]
    # A field named `schema` would hide a method of pydantic's.
    given: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    """Anthropic's `output_config`."""

    format: OutputFormat | None = None
    effort: ReasoningEffort | None = None


class _ChatOfMessages(ChatRequest):
    """A chat whose errors name the fields of `/v1/messages`."""

    @property
    def sent_names(self) -> dict[str, str]:
        """The request's names of sampling parameters."""
        return {"stop": "stop_sequences", "thinking_token_budget": "thinking.budget_tokens"}

    @property
    def structure_field(self) -> str:
        """The field that says which form the output follows."""
        own = super().structure_field
        return "output_config" if own == "response_format" else own


class MessagesRequest(RequestModel):
    """Anthropic's fields, and the variables of the chat template."""

    model: str | None = None
    messages: Objects[MessageIn]
    max_tokens: Int | None = None
    system: str | Objects[MessageBlock] | None = None
    stop_sequences: ListOf[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    tools: Objects[ToolIn] | None = None
    tool_choice: ToolChoiceIn | None = None
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def chat(self, *, may_think: bool) -> ChatRequest:
        """Return the chat that the request stands for.

        Args:
            may_think: whether the served model thinks; a limit of its thinking means nothing otherwise.

        Raises:
            ApiError: a part that is not supported, or that lacks a field.
        """
        blocks = self.system or []
        if not isinstance(blocks, str):
            blocks = [block for block in blocks if not (block.text or "").startswith(_BILLING)]
        system = [{"role": "system", "content": _text(blocks, "system")}] if blocks else []
        given: dict[str, Any] = {
            "messages": [*system, *(each for message in self.messages for each in _messages(message))],
            "stop": self.stop_sequences,
            "chat_template_kwargs": dict(self.chat_template_kwargs or {}),
            **{name: getattr(self, name) for name in _SAME},
        }
        if self.messages and self.messages[-1].role == "assistant":
            given["continue_final_message"] = True
        if self.thinking is not None and self.thinking.type == "disabled":
            given["chat_template_kwargs"]["enable_thinking"] = False
        elif self.thinking is not None and may_think:
            given["thinking_token_budget"] = self.thinking.budget_tokens
        if (output := self.output_config) is not None:
            given["reasoning_effort"] = output.effort
            if output.format is not None:
                schema = {"name": "answer", "schema": output.format.given}
                given["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.tools:
            given["tools"] = [_tool(tool) for tool in self.tools]
        if (choice := self.tool_choice) is not None:
            named = {"type": "function", "function": {"name": choice.name}}
            given["tool_choice"] = named if choice.type == "tool" else _CHOICES[choice.type]
            given["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        try:
            return _ChatOfMessages.model_validate(given)
        except ValidationError as error:
            # A chat may have more messages, for each result of a tool is one.
            raise ApiError(400, f"messages: {error.errors()[0]['msg']}", param="messages") from None


def _tool(tool: ToolIn) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise ApiError(400, f"tools holds one of type {tool.type!r:.60}; give tools of the client alone", param="tools")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _messages(message: MessageIn) -> Iterator[dict[str, Any]]:
    """Yield a message as messages of a chat: results of tools have a role of their own there."""
    blocks = message.content
    if isinstance(blocks, str):
        yield {"role": message.role, "content": blocks}
        return
    if message.role == "assistant":
        thoughts = [block.thinking or "" for block in blocks if block.type == "thinking"]
        calls = [_call(block) for block in blocks if block.type == "tool_use"]
        kinds = ("thinking", "redacted_thinking", "tool_use")
        content = _text([block for block in blocks if block.type not in kinds], "messages")
        turn = {"role": "assistant", "content": content, "tool_calls": calls, "reasoning_content": "\n".join(thoughts)}
        yield {key: value for key, value in turn.items() if value or key == "content"}
        return
    for block in blocks:
        if block.type == "tool_result":
            text = _text(block.content or "", "messages")
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
    if others := [block for block in blocks if block.type not in ("tool_result", _ADDITION)]:
        yield {"role": message.role, "content": _text(others, "messages")}


def _call(block: MessageBlock) -> dict[str, Any]:
    if not block.name:
        raise ApiError(400, "messages holds a tool_use without a name; give it", param="messages")
    function = {"name": block.name, "arguments": json.dumps(block.input or {})}
    return {"id": block.id, "type": "function", "function": function}


def _text(content: str | Sequence[MessageBlock], field: str) -> str:
    """Return the text of content; that of a reference to a tool is its name.

    Raises:
        ApiError: a part that is no text.
    """
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        text = {"text": part.text, "tool_reference": part.tool_name}.get(part.type)
        if text is None:
            message = f"{field} holds a part of type {part.type!r:.60}; only text, thinking and calls are supported"
            raise ApiError(400, message, param=field)
        texts.append(text)
    return "\n".join(texts)
