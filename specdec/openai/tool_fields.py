"""Fields of a request that say which tools its answer calls."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from specdec.core.call_grammar import forced_calls
from specdec.core.structured_outputs import StructuredOutputsParams
from specdec.core.tool_choice import Function, ToolChoice, read_tool_choice
from specdec.openai.errors import ApiError
from specdec.openai.sampling_fields import SamplingFields
from specdec.tool_calls.tagged_calls import ToolParser


class ToolFields(SamplingFields):
    """OpenAI's `tool_choice` and `parallel_tool_calls`. Arguments of forced calls follow their schema with `strict` and
    without.
    """

    # Names of the fields that hold the conversation, and the limit of an answer's tokens.
    PROMPT_FIELD: ClassVar[str]
    LIMIT_FIELD: ClassVar[str]
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    @property
    @abstractmethod
    def offered(self) -> list[dict[str, Any]]:
        """OpenAI's objects of the functions that the request offers."""

    @property
    def limit(self) -> int | None:
        """Most tokens of an answer; None for as many as the context has room for."""
        own: int | None = getattr(self, self.LIMIT_FIELD)
        return self.max_tokens if own is None else own

    @property
    def sent_names(self) -> dict[str, str]:
        """The request's names of sampling parameters."""
        has_limit = getattr(self, self.LIMIT_FIELD) is not None
        return {"logprobs": "top_logprobs", **({"max_tokens": self.LIMIT_FIELD} if has_limit else {})}

    @property
    def calls(self) -> ToolChoice:
        """Calls that the request wants.

        Raises:
            ApiError: a value that is none, or that does not fit the tools.
        """
        try:
            return read_tool_choice(self.tool_choice, self.offered)
        except ValueError as error:
            raise ApiError(400, str(error), param="tool_choice") from None

    @property
    def uses_tools(self) -> bool:
        return self.calls.mode != "none"

    @property
    def is_single_call(self) -> bool:
        """Return whether the answer may hold one call only."""
        return self.parallel_tool_calls is False

    @property
    def structure_field(self) -> str:
        """The field that says which form the output follows."""
        return "tools" if self.calls.is_forced else super().structure_field

    def shown_functions(self) -> Sequence[dict[str, Any]]:
        """Return the functions that the chat template shows."""
        calls = self.calls
        return [each for each in self.offered if calls.shows(each.get("name"))]

    def forced_calls(self, kind: type[ToolParser], special: Mapping[str, int]) -> StructuredOutputsParams | None:
        """Return the form of an answer that must be calls, None for another.

        An answer that is calls is no message, so `response_format` does not concern it.

        Args:
            kind: the model's form of calls.
            special: its tags that are special tokens of the tokenizer.

        Raises:
            ApiError: a function whose name or parameters are of a wrong type, or another form of output.
        """
        calls = self.calls
        if not calls.is_forced:
            return None
        if self.structured_outputs is not None:
            message = "structured_outputs and a tool_choice that forces calls exclude each other; leave one out"
            raise ApiError(400, message, param="structured_outputs")
        allowed = [each for each in self.offered if calls.allows(each.get("name"))]
        try:
            functions = [Function.of(each) for each in allowed]
            return forced_calls(calls, functions, kind.FORM, special, is_single=self.is_single_call)
        except ValueError as error:
            raise ApiError(400, str(error), param="tools") from None
