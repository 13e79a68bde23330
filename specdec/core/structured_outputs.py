"""The form that an output must have: a JSON schema, a regular expression, a choice or a grammar. Pure Python."""

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.core.call_forms import ForcedCalls
from specdec.core.errors import wrong
from specdec.json_schema.schema import SchemaError, followed_schema
from specdec.kernels.types.settings import (
    Foreign,
    ParameterError,
    check_settings,
    check_text,
    checked_keywords,
    setting,
)

# Bytes of a schema up to which its keywords are checked at once; those of a longer one, where it becomes a grammar.
_CHECKED_BYTES = 1 << 18
# Fields of which a request gives exactly one.
FORMS = ("json", "regex", "choice", "grammar", "json_object")
_ALL_FORMS = (*FORMS, "calls")

_FOREIGN = {
    "disable_fallback": Foreign("there is one backend and no fallback; leave it out", (False, True)),
    "disable_additional_properties": Foreign("write additionalProperties into the schema", (False,)),
    "whitespace_pattern": Foreign("use disable_any_whitespace"),
    "structural_tag": Foreign("use json, regex, choice or grammar"),
}


@checked_keywords(_FOREIGN)
@dataclass(frozen=True)
class StructuredOutputsParams:
    """Form of a request's output, by vLLM's names. Exactly one of `json`, `regex`, `choice`, `grammar` and
    `json_object` is given. The output follows it from its first token to its end.

    That no value follows a schema, or that a text is no grammar, is seen when a request begins.

    Attributes:
        calls: forced tool calls, in place of the others; see `specdec.core.call_grammar.forced_calls`.

    Raises:
        ValueError: none of them or several, a value of another type, or a schema with a keyword that is not supported.
    """

    json: str | Mapping[str, Any] | None = setting(None, "JSON schema, as text or as an object.", flags="")
    regex: str | None = setting(None, "Regular expression that the whole output matches.", flags="")
    choice: Sequence[str] | None = setting(None, "Texts, one of which is the output.", flags="")
    grammar: str | None = setting(
        None, "Context-free grammar, in GBNF (with a rule `root`) or in Lark's form.", flags=""
    )
    json_object: bool | None = setting(None, "True: the output is a JSON object of any content.", flags="")
    disable_any_whitespace: bool = setting(
        True,
        "JSON in one line, with one space after each comma and colon. False leaves blanks and line ends to the model, "
        "and less text is drafted for free.",
        flags="",
    )
    calls: ForcedCalls | None = None

    def __post_init__(self) -> None:
        check_settings(self)
        given = [name for name in _ALL_FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            what = " and ".join(given) if given else "none"
            raise wrong("structured_outputs", f"has {what} of {', '.join(FORMS)}; give exactly one")
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                check_text(f"structured_outputs.{name}", getattr(self, name))
        if self.choice is not None:
            object.__setattr__(self, "choice", self._checked_choice())
        if self.json is not None:
            object.__setattr__(self, "json", self._checked_json())

    @property
    def form(self) -> str:
        """Name of the field that is given."""
        return next(name for name in _ALL_FORMS if getattr(self, name) not in (None, False))

    @property
    def shown_form(self) -> str:
        """The field that is given, as messages name it."""
        return "tools" if self.calls is not None else f"structured_outputs.{self.form}"

    @property
    def num_bytes(self) -> int:
        """Size of the form as it was given, in bytes of UTF-8."""
        texts = self.choice or [str(getattr(self, self.form))]
        if self.calls is not None:
            texts = [text for function in self.calls.functions for text in function]
        return sum(len(text.encode(errors="surrogatepass")) for text in texts)

    def _checked_choice(self) -> tuple[str, ...]:
        name, choice = "structured_outputs.choice", self.choice
        if isinstance(choice, str) or not isinstance(choice, Sequence) or not choice:
            raise ParameterError("structured_outputs", f"{name} is {choice!r}; it must be a list of at least one text")
        for text in choice:
            check_text(name, text)
            if not text:
                raise ParameterError("structured_outputs", f"{name} holds an empty text; leave it out")
        return tuple(choice)

    def _checked_json(self) -> str:
        """Return the schema as text."""
        name, schema = "structured_outputs.json", self.json
        if isinstance(schema, str):
            check_text(name, schema)
            try:
                schema = json_text.loads(schema)
            except (ValueError, RecursionError) as error:
                raise wrong(name, f"is not valid JSON: {error}; give a JSON schema") from None
        if not isinstance(schema, Mapping):
            raise wrong(name, f"is {schema!r:.50}; it must be a JSON schema: an object, or its text")
        try:
            text = json_text.dumps(schema, allow_nan=False)
            if len(text) <= _CHECKED_BYTES:
                followed_schema(json_text.loads(text))
        except SchemaError as error:
            raise ParameterError(name, f"{name}: {error}") from None
        except (TypeError, ValueError, RecursionError):
            raise wrong(name, "holds a value that JSON does not have, or is nested too deeply") from None
        check_text(name, text)
        return text
