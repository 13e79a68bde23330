"""Fields of a request that say which form the output follows, by OpenAI's and vLLM's names."""

from typing import Any, Literal

from pydantic import Field

from specdec.core.structured_outputs import StructuredOutputsParams
from specdec.openai.errors import ApiError
from specdec.openai.request_model import ListOf, RequestModel


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
            return _params(field, json=described.given)
        if self.type == "structural_tag":
            message = f"{field} is 'structural_tag'; supported are 'text', 'json_object' and 'json_schema'"
            raise ApiError(400, message, param=field)
        if self.type == "text":
            return None
        return _params(field, json_object=True) if self.given is None else _params(field, json=self.given)


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
        return _params(field, **self.model_dump(by_alias=True, exclude_none=True))


def _params(field: str, **given: Any) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(**given)
    except ValueError as error:
        raise ApiError(400, str(error), param=field) from None
