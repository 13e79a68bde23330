"""Base of the bodies of all requests."""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from specdec.openai.errors import ApiError

T = TypeVar("T")


def _all_are(kinds: tuple[type, ...], what: str) -> BeforeValidator:
    def check(value: Any) -> Any:
        if isinstance(value, dict) and not all(type(each) in kinds for each in value.values()):
            raise ValueError(f"all values should be {what}")
        return value

    return BeforeValidator(check)


# Containers of which only the first wrong value is an error: a body has room for a million of them, and describing
# that many errors takes a minute.
ListOf = Annotated[list[T], Field(fail_fast=True)]
Texts = Annotated[dict[str, str], _all_are((str,), "strings")]
Numbers = Annotated[dict[str, float], _all_are((int, float), "numbers")]
# Objects cost more than their bytes.
MOST_OBJECTS = 1 << 14
Objects = Annotated[list[T], Field(fail_fast=True, max_length=MOST_OBJECTS)]

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
_REMEDIES = {"functions": "use tools", "function_call": "use tool_choice"}
_EMPTY: tuple[Any, ...] = (None, False, "", [], {})


class RequestModel(BaseModel):
    """A request's body. Values have the type that is asked for, and null stands for a field that is left out."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    def unknown_fields(self) -> list[str]:
        """Return the names of fields that the API does not have."""
        return list(self.model_extra or {})

    def ignored(self) -> list[str]:
        """Describe ignored parts of the request for the log."""
        return [f"the unknown field {name!r:.50}" for name in self.unknown_fields()]

    def check_unknown(self) -> None:
        """Refuse fields that would change the output and that the API does not have.

        Raises:
            ApiError: names the field.
        """
        for name, value in (self.model_extra or {}).items():
            if name in _REFUSED and value not in (*_EMPTY, *_REFUSED[name]):
                raise self.refuse(name, _REMEDIES.get(name, "leave it out"))

    def check_known(self, field: str) -> None:
        """Refuse fields that this object, which a field of the request holds, does not have.

        Raises:
            ApiError: names the unknown field and those that there are.
        """
        if unknown := self.unknown_fields():
            known = [each.alias or name for name, each in type(self).model_fields.items()]
            message = f"{field} holds {unknown[0][:50]!r}; it may hold {', '.join(known)}"
            raise ApiError(400, message, param=field)

    def refuse(self, name: str, remedy: str) -> ApiError:
        """Return the error of a field that has a value this server cannot serve."""
        return ApiError(400, f"{name} is not supported; {remedy}", param=name)
