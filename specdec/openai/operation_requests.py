"""Bodies of `/tokenize`, `/detokenize`, `/abort`, `/update_draft` and the routes of adapters."""

from specdec.openai.chat_request import TemplateFields
from specdec.openai.request_model import ListOf, RequestModel
from specdec.openai.sampling_fields import Int


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
