"""Bodies of requests that generate no text: scores of choices, tokens, abort, updates of the draft, and adapters."""

from typing import ClassVar

from specdec.core.sampling_params import SamplingParams
from specdec.openai.chat_request import TemplateFields
from specdec.openai.errors import ApiError, bad_request
from specdec.openai.request_model import ListOf, RequestModel
from specdec.openai.sampling_fields import Int, SamplingFields


class ScoringRequest(TemplateFields):
    """A prompt or a conversation, and texts or token ids that may follow it."""

    # As requests that generate have them.
    stream: ClassVar[bool] = False
    trace: ClassVar[bool] = False
    structure_field: ClassVar[str] = "choices"
    sent_names: ClassVar[dict[str, str]] = {}
    # Pydantic reports a missing field only where it is required.
    choices: ListOf[str] | ListOf[ListOf[Int]]
    model: str | None = None
    prompt: str | ListOf[Int] | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    user: str | None = None

    def sampling_params(self) -> SamplingParams:
        """Return the parameters of the engine's request.

        Raises:
            ApiError: a field that asks for generated text, no choices, or an empty one.
        """
        for name in self.unknown_fields():
            if name in SamplingFields.model_fields and (self.model_extra or {})[name] is not None:
                raise self.refuse(name, "choices are scored and nothing is generated; leave it out")
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        if self.messages is None:
            self.check_prompt()
        try:
            return SamplingParams(choices=self.choices, max_tokens=None)
        except ValueError as error:
            raise bad_request(error) from None


class TokenizeRequest(TemplateFields):
    """vLLM's fields: a prompt, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestModel):
    """vLLM's fields."""

    model: str | None = None
    tokens: ListOf[Int]


class AbortRequest(RequestModel):
    """The id of an answer, or the X-Request-Id of its request."""

    request_id: str


class UpdateDraftRequest(RequestModel):
    """The folder of a head on the server's machine, or its name on the hub."""

    draft: str


class LoadAdapterRequest(RequestModel):
    """vLLM's fields: a name, and the adapter's folder on the server's machine, beside it the draft model's."""

    lora_name: str
    lora_path: str = ""
    draft_lora_path: str | None = None
    load_inplace: bool | None = None


class UnloadAdapterRequest(RequestModel):
    """vLLM's fields."""

    lora_name: str
    lora_int_id: Int | None = None
