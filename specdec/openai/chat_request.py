"""Body of `/v1/chat/completions`: messages, tools and their options."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator

from specdec.core.chat_content import part_texts
from specdec.openai.errors import ApiError
from specdec.openai.request_model import Objects, RequestModel
from specdec.openai.sampling_fields import Int, check_logprobs
from specdec.openai.tool_fields import ToolFields

_NO_TEMPLATE_ARGUMENTS = (
    *("chat_template", "conversation", "messages", "tokenize", "return_tensors", "return_dict", "padding"),
    *("truncation", "max_length", "tokenizer_kwargs", "return_assistant_tokens_mask"),
)
# What requests say by fields, which would silently win.
_BY_FIELDS = ("add_generation_prompt", "continue_final_message", "tools")
# OpenAI's values, and vLLM's besides.
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ContentPart(RequestModel):
    """A part of a message."""

    type: str
    text: str | None = None


Content = str | Objects[ContentPart | str]


def content_parts(content: Content | None) -> list[Any]:
    """Return content as a list of parts."""
    if isinstance(content, str):
        return [content] if content else []
    return [part if isinstance(part, str) else part.model_dump() for part in content or ()]


def content_text(content: Content | None, separator: str, field: str) -> str:
    """Return the text of all parts of content, which a field of the request holds.

    Raises:
        ApiError: content other than text.
    """
    try:
        return separator.join(part_texts(content_parts(content)))
    except ValueError as error:
        raise ApiError(400, str(error), param=field) from None


class ChatMessageIn(RequestModel):
    """A message of the conversation. Further fields go to the chat template as they are."""

    role: str
    content: Content | None = None
    tool_calls: Objects[dict[str, Any]] | None = None


def _check_name(function: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(function.get("name"), str):
        raise ValueError(f"a function's name is {function.get('name')!r:.60}; it must be text")
    return function


class Tool(RequestModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Annotated[dict[str, Any], AfterValidator(_check_name)]


class Prediction(RequestModel):
    """Predicted output: text that the answer will probably repeat."""

    type: Literal["content"]
    content: Content


class TemplateArguments(RequestModel):
    """Further variables of the chat template."""

    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def effort(self) -> ReasoningEffort | None:
        """Reasoning effort; None for the chat template's default."""
        return None

    def own_arguments(self) -> dict[str, Any]:
        """Return them, and those that stand for the effort of reasoning unless they are given.

        Raises:
            ApiError: one that requests may not set.
        """
        given = dict(self.chat_template_kwargs or {})
        by_fields = [name for name in _BY_FIELDS if name in type(self).model_fields]
        for name in (*_NO_TEMPLATE_ARGUMENTS, *by_fields):
            if name in given:
                remedy = "use the request's own fields" if name in by_fields else "leave it out"
                message = f"chat_template_kwargs may not hold {name!r}; {remedy}"
                raise ApiError(400, message, param="chat_template_kwargs")
        if self.effort is not None:
            # Templates of Qwen3 and others have a switch of their own.
            switch = {"enable_thinking": False} if self.effort == "none" else {}
            given = {"reasoning_effort": self.effort, **switch, **given}
        return given


class TemplateFields(TemplateArguments):
    """Fields that a chat template reads, by vLLM's names."""

    messages: Objects[ChatMessageIn] | None = None
    tools: Objects[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def chat_messages(self) -> list[dict[str, Any]]:
        """Return the messages.

        Raises:
            ApiError: there are none.
        """
        self.check_unknown()
        if not self.messages:
            raise ApiError(400, "messages is empty; give at least one message", param="messages")
        if self.add_special_tokens:
            raise self.refuse("add_special_tokens", "the chat template writes the special tokens of a conversation")
        return [message.model_dump() for message in self.messages]

    def check_prompt(self) -> None:
        """Refuse fields of conversations beside a prompt.

        Raises:
            ApiError: names the field.
        """
        for name in ("tools", "continue_final_message", "chat_template_kwargs"):
            if getattr(self, name):
                raise self.refuse(name, "it belongs to messages, and the request has a prompt")

    def template_arguments(self) -> dict[str, Any]:
        """Return what the chat template gets beside the messages.

        Raises:
            ApiError: an argument that requests may not set, or two that exclude each other.
        """
        given = self.own_arguments()
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt exclude each other; leave one out"
            raise ApiError(400, message, param="continue_final_message")
        given["add_generation_prompt"] = self.add_generation_prompt is not False and not self.continue_final_message
        if self.continue_final_message:
            given["continue_final_message"] = True
        if self.tools:
            given["tools"] = [tool.model_dump() for tool in self.tools]
        return given


class ChatRequest(TemplateFields, ToolFields):
    """OpenAI's fields, and vLLM's besides."""

    PROMPT_FIELD: ClassVar[str] = "messages"
    LIMIT_FIELD: ClassVar[str] = "max_completion_tokens"
    # Pydantic reports a missing field only where it is required.
    messages: Objects[ChatMessageIn]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    prediction: Prediction | None = None
    echo: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: ReasoningEffort | None = None

    @property
    def effort(self) -> ReasoningEffort | None:
        """Reasoning effort; None for the chat template's default."""
        return self.reasoning_effort

    @property
    def offered(self) -> list[dict[str, Any]]:
        return [tool.function for tool in self.tools or ()]

    def template_arguments(self) -> dict[str, Any]:
        """Return what the chat template gets beside the messages."""
        given = super().template_arguments()
        given.pop("tools", None)
        if shown := self.shown_functions():
            given["tools"] = [tool.model_dump() for tool in self.tools or () if tool.function in shown]
        return given

    @property
    def num_logprobs(self) -> int | None:
        """Number of most probable tokens to show per token, None without log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check_supported(self, most_logprobs: int) -> None:
        """See `SamplingFields.check_supported`."""
        super().check_supported(most_logprobs)
        if self.echo:
            raise self.refuse("echo", "use /v1/completions")
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs true", param="top_logprobs")
        check_logprobs(self.top_logprobs, most_logprobs, "top_logprobs")
