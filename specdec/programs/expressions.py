"""Expressions of programs: constant text, generation, selection and roles, in the order in which they are appended."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.core.sampling_params import SamplingParams
from specdec.core.structured_outputs import StructuredOutputsParams
from specdec.programs.choice_methods import ChoiceMethod, token_length_normalized

# SGLang's limit of a `gen` that names none.
DEFAULT_MAX_TOKENS = 128
# Parameters that ask for something else than one text. For several texts, fork the state.
_NOT_OF_GEN = {"n", "logprobs", "prompt_logprobs", "output_kind", "detokenize", "truncate_prompt_tokens", "choices"}


@dataclass(frozen=True)
class Gen:
    """Text that the model generates.

    Attributes:
        name: variable that holds it; None for none.
        given: fields of `SamplingParams`, as they were given.
    """

    name: str | None
    given: Mapping[str, Any]

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the sampling parameters, with the run's defaults for what was not given.

        Raises:
            ValueError: one that is unknown, outside its range, or asks for something else than one text.
        """
        params = {**defaults, **self.given}
        for name in sorted(_NOT_OF_GEN & params.keys()):
            raise ValueError(f"{name} is {params[name]!r:.50}; a gen is one text: leave it out")
        return SamplingParams(**params)


@dataclass(frozen=True)
class Select:
    """The one of some texts that the model finds most probable.

    Attributes:
        name: variable that holds it; None for none.
        method: which of the scored choices it is.
    """

    name: str | None
    choices: tuple[str, ...]
    method: ChoiceMethod


@dataclass(frozen=True)
class RoleBegin:
    """Beginning of a message."""

    role: str


@dataclass(frozen=True)
class RoleEnd:
    """End of the open message."""


Operation = str | Gen | Select | RoleBegin | RoleEnd


@dataclass(frozen=True)
class Expression:
    """Operations in order. Text and other expressions can be added at both ends."""

    operations: tuple[Operation, ...]

    def __add__(self, other: "str | Expression") -> "Expression":
        return Expression((*self.operations, *operations_of(other)))

    def __radd__(self, other: str) -> "Expression":
        return Expression((*operations_of(other), *self.operations))


def operations_of(given: "str | Expression") -> tuple[Operation, ...]:
    """Return the operations of what a program appends.

    Raises:
        ValueError: neither text nor an expression.
    """
    if isinstance(given, Expression):
        return given.operations
    if not isinstance(given, str):
        raise ValueError(f"a program appends {given!r:.50}; it must be text, gen, select or a role")
    return (given,)


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    *,
    regex: str | None = None,
    json_schema: str | Mapping[str, Any] | None = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoiceMethod = token_length_normalized,
    **params: Any,
) -> Expression:
    """Return an expression that generates text.

    Args:
        name: variable that holds the text.
        max_tokens: limit of its tokens; 128 where neither this nor the run's `params` say.
        stop: texts before which it ends.
        regex: regular expression that it matches.
        json_schema: JSON schema that it follows.
        choices: makes it a `select` among these; the parameters after `name` have no effect then.
        choices_method: see `select`.
        params: further fields of `SamplingParams`, such as `temperature`.

    Raises:
        ValueError: a parameter that is unknown, or outside its range.
    """
    form = None
    if regex is not None or json_schema is not None:
        form = StructuredOutputsParams(regex=regex, json=json_schema)
    own = {"max_tokens": max_tokens, "stop": stop, "structured_outputs": form}
    made = Gen(name, {**params, **{field: value for field, value in own.items() if value is not None}})
    made.params({})
    # As in SGLang, the others have no effect then.
    return Expression((made,)) if choices is None else select(name, choices, choices_method)


def select(
    name: str | None = None, choices: Sequence[str] = (), choices_method: ChoiceMethod = token_length_normalized
) -> Expression:
    """Return an expression that takes one of several texts, all of which are scored in one pass.

    Args:
        name: variable that holds the text.
        choices: the texts.
        choices_method: says which of the scored choices it is.

    Raises:
        ValueError: no choices, or an empty one.
    """
    SamplingParams(choices=choices)
    return Expression((Select(name, tuple(choices), choices_method),))


def role(name: str, content: str | Expression) -> Expression:
    """Return a message of a role."""
    return Expression((RoleBegin(name), *operations_of(content), RoleEnd()))


def system(content: str | Expression) -> Expression:
    """Return a message of the system."""
    return role("system", content)


def user(content: str | Expression) -> Expression:
    """Return a message of the user."""
    return role("user", content)


def assistant(content: str | Expression) -> Expression:
    """Return a message of the assistant, within which text can be generated."""
    return role("assistant", content)
