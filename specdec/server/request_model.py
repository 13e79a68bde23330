"""Base of the bodies of all requests."""

from typing import Any

from pydantic import BaseModel, ConfigDict

from specdec.server.errors import ApiError

# Fields that would change the output and that this server lacks, with values that ask for nothing, as empty ones do.
# Other unknown fields are ignored with a warning.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "logits_processors": (),
    "prompt_embeds": (),
    "use_beam_search": (),
    "functions": (),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "documents": (),
    "chat_template": (),
}
_EMPTY: tuple[Any, ...] = (None, False, "", [], {})


class RequestModel(BaseModel):
    """A request's body. Values have the type that is asked for, and null stands for a field that is left out."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    def unknown_fields(self) -> list[str]:
        """Return the names of fields that the API does not have."""
        return list(self.model_extra or {})

    def check_unknown(self) -> None:
        """Refuse fields that would change the output and that the API does not have.

        Raises:
            ApiError: names the field.
        """
        for name, value in (self.model_extra or {}).items():
            if name in _REFUSED and value not in (*_EMPTY, *_REFUSED[name]):
                raise self.refuse(name, "leave it out")

    def refuse(self, name: str, remedy: str) -> ApiError:
        """Return the error of a field that has a value this server cannot serve."""
        return ApiError(400, f"{name} is not supported; {remedy}", param=name)
