"""Answers of `/v1/responses`, in OpenAI's shapes."""

from typing import Any

from msgspec import UNSET, Struct, UnsetType, field

from specdec.openai.replies import TokenLogprob
from specdec.openai.speculation_replies import SglExt, SpeculationMetrics


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
    output: list[OutputMessage | OutputReasoning | OutputCall] = field(default_factory=list)
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
