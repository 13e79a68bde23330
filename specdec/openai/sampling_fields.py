"""Fields of a request that become sampling parameters, structured outputs too, by OpenAI's and vLLM's names."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from specdec.core.sampling_params import SamplingParams, Speculation
from specdec.core.structured_outputs import StructuredOutputsParams
from specdec.openai.errors import ApiError, bad_request
from specdec.openai.request_model import ListOf, Numbers, RequestModel

# OpenAI's limit of `n`.
MOST_SAMPLES = 128
_WORD = 1 << 63
Int = Annotated[int, Field(ge=-_WORD, lt=_WORD)]
# vLLM's older names of structured outputs.
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


class StreamOptions(RequestModel):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SpeculationFields(RequestModel):
    """Bounds of a request's drafts; see `Speculation`."""

    enabled: bool | None = None
    max_nodes: Int | None = None
    max_depth: Int | None = None

    def speculation(self) -> Speculation:
        """Return the bounds.

        Raises:
            ApiError: a bound outside its range, or an unknown one.
        """
        self.check_known("speculation")
        try:
            return Speculation(**self.model_dump(exclude_none=True))
        except ValueError as error:
            raise ApiError(400, f"speculation: {error}", param="speculation") from None


class JsonSchema(RequestModel):
    """OpenAI's `json_schema` of a chat completion. Output follows the schema with `strict` and without."""

    name: str | None = None
    description: str | None = None
    # A field named `schema` would hide a method of pydantic's.
    given: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestModel):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    # llama.cpp's, beside `json_object`.
    given: dict[str, Any] | None = Field(None, alias="schema")

    @property
    def described(self) -> JsonSchema | None:
        """The schema with its name."""
        return self.json_schema

    def structure(self, field: str) -> StructuredOutputsParams | None:
        """Return the form that the output follows, None for any.

        Args:
            field: its name in the request.

        Raises:
            ApiError: a schema that is missing, or that cannot be followed.
        """
        if self.type == "json_schema":
            described = self.described
            if described is None or described.name is None or described.given is None:
                raise ApiError(400, f"{field} is 'json_schema'; give its name and its schema", param=field)
            return _structured(field, json=described.given)
        if self.type == "structural_tag":
            message = f"{field} is 'structural_tag'; supported are 'text', 'json_object' and 'json_schema'"
            raise ApiError(400, message, param=field)
        if self.type == "text":
            return None
        return _structured(field, json_object=True) if self.given is None else _structured(field, json=self.given)


class TextFormat(JsonSchema, ResponseFormat):
    """`text.format` of `/v1/responses`, where name and schema stand beside the type."""

    @property
    def described(self) -> JsonSchema:
        """The schema with its name."""
        return self


class StructuredOutputsFields(RequestModel):
    """vLLM's `structured_outputs`; see `StructuredOutputsParams`."""

    # A field named `json` would hide a method of pydantic's.
    given_json: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: ListOf[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None

    def structure(self) -> StructuredOutputsParams:
        """Return the form that the output follows.

        Raises:
            ApiError: an unknown field, none or several of those that exclude each other, or a wrong value.
        """
        field = "structured_outputs"
        self.check_known(field)
        return _structured(field, **self.model_dump(by_alias=True, exclude_none=True))


def _structured(field: str, **given: Any) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(**given)
    except ValueError as error:
        raise bad_request(error, None, {"structured_outputs": field}) from None


class SamplingFields(RequestModel):
    """Fields that completions and chat completions share; those of `SamplingParams` have its names and meanings."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Numbers | None = None
    allowed_token_ids: ListOf[Int] | None = None
    bad_words: ListOf[str] | None = None
    seed: Int | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    stop: str | ListOf[str] | None = None
    stop_token_ids: ListOf[Int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Int | None = None
    truncate_prompt_tokens: Int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    speculation: SpeculationFields | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_meta_info: bool | None = None
    return_spec_tokens_details: bool | None = None
    trace: bool | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsFields | None = None
    thinking_token_budget: Int | None = None
    reasoning_ended: bool | None = None

    @property
    def uses_tools(self) -> bool:
        """Return whether the answer may hold tool calls."""
        return False

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check_supported(self, most_logprobs: int) -> None:
        """Refuse fields that would change the output and are not supported.

        Args:
            most_logprobs: log-probabilities per token that the server gives.

        Raises:
            ApiError: names the field.
        """
        self.check_unknown()
        for name in _GUIDED:
            if (self.model_extra or {}).get(name) not in (None, "", []):
                raise self.refuse(name, f"use structured_outputs with {name.removeprefix('guided_')!r}")
        if not self.stream and self.stream_options is not None and any(self.stream_options.model_dump().values()):
            raise ApiError(400, "stream_options is only allowed with stream true", param="stream_options")
        if self.n is not None and self.n > MOST_SAMPLES:
            raise ApiError(400, f"n is {self.n}; it must be at most {MOST_SAMPLES}", param="n")
        check_logprobs(self.prompt_logprobs, most_logprobs, "prompt_logprobs")
        if self.trace and most_logprobs == 0:
            message = "trace is not supported; it shows probabilities, and this server gives none (--max-logprobs 0)"
            raise ApiError(400, message, param="trace")

    @property
    def sent_names(self) -> dict[str, str]:
        """The request's names of sampling parameters, where they differ."""
        return {}

    @property
    def structure_field(self) -> str:
        """The field that says which form the output follows."""
        return "structured_outputs" if self.structured_outputs is not None else "response_format"

    def structure(self) -> StructuredOutputsParams | None:
        """Return the form that the output follows, None for any.

        Raises:
            ApiError: a field that is wrong, or two that exclude each other.
        """
        own = None if self.response_format is None else self.response_format.structure(self.structure_field)
        if self.structured_outputs is None:
            return own
        if own is not None:
            message = "structured_outputs and response_format exclude each other; leave one out"
            raise ApiError(400, message, param="structured_outputs")
        return self.structured_outputs.structure()

    def sampling_params(
        self, defaults: Mapping[str, Any], calls: StructuredOutputsParams | None = None, **own: Any
    ) -> SamplingParams:
        """Return the parameters of a request.

        Args:
            calls: form of an answer that must be tool calls.
            defaults: values of parameters that the request leaves out; `kept_special_tokens`, the tags of tool calls,
                only counts for answers that may hold calls.
            own: values that the kind of request decides; None for what it leaves open.

        Raises:
            ApiError: a value outside its range.
        """
        given = {name: getattr(self, name) for name in SAMPLING_NAMES} | own
        values = dict(defaults) | {name: value for name, value in given.items() if value is not None}
        if not self.uses_tools:
            values.pop("kept_special_tokens", None)
        if "logit_bias" in values:
            values["logit_bias"] = _by_token(values["logit_bias"])
        if self.speculation is not None:
            values["speculation"] = self.speculation.speculation()
        values["structured_outputs"] = self.structure() if calls is None else calls
        try:
            return SamplingParams(**values)
        except ValueError as error:
            raise bad_request(error, self.sent_names, {"structured_outputs": self.structure_field}) from None


# Log-probabilities and the limit of tokens are spelled differently by each kind of request.
SAMPLING_NAMES = tuple(name for name in SamplingFields.model_fields if hasattr(SamplingParams, name))


def check_logprobs(count: int | None, most: int, name: str) -> None:
    """Refuse more log-probabilities than the server gives.

    Raises:
        ApiError: names the field.
    """
    if count is not None and not 0 <= count <= most:
        raise ApiError(400, f"{name} is {count}; it must be at least 0 and at most {most}", param=name)


def _by_token(bias: Mapping[str, float]) -> dict[int, float]:
    if wrong := [token for token in bias if not re.fullmatch("0|-?[1-9][0-9]*", token)]:
        raise ApiError(400, f"logit_bias holds {wrong[0]!r:.60}; it must map token ids to numbers", param="logit_bias")
    return {int(token): value for token, value in bias.items()}
