"""Settings, each declared once: a dataclass field with its help text and the values it allows. Pure Python."""

import dataclasses
import functools
import inspect
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

_KEY = "setting"
# KB is 1,000 bytes; KiB, and K alone, are 1,024.
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,6})?) ?([KMGT](?:i?B)?)?", re.IGNORECASE)
MAX_WHOLE = (1 << 63) - 1
Call = TypeVar("Call", bound=Callable[..., Any])
Owner = TypeVar("Owner")
KernelChoice = Literal["auto", "torch", "triton", "native"]
Quantization = Literal["none", "q8"]
KVCacheDtype = Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"]


class ParameterError(ValueError):
    """A parameter or setting has a wrong value.

    Attributes:
        field: its name; `structured_outputs.json` for a part of `structured_outputs`.
        code: a word for programs, None for most errors.
    """

    def __init__(self, field: str, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.field, self.code = field, code


def one_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name, as text that can be sent."""
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return line.encode(errors="backslashreplace").decode()


@dataclass(frozen=True)
class Setting:
    """Facts about a setting beside its type and default.

    Attributes:
        help: a sentence for people.
        least, most, above, below: bounds of a number; `above` and `below` exclude their own value.
        wanted: what is allowed, in words; None to derive it from the bounds.
        flags: how it is spelled on the command line; None for the name with dashes, "" for no option of most commands.
        short: a short form of the flag.
        panel: heading of its group in the help of the command line; None for that of its dataclass, `PANEL`.
        metavar: stands for the value in the help of the command line.
        shown_default: stands for the default there.
        envvar: environment variable that stands for the option.
        choices: the values that the command line offers, where the type does not name them.
        is_size: whether its number of bytes may be a text with a unit, such as 4GiB; see `size_in_bytes`.
    """

    help: str
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    wanted: str | None = None
    flags: str | None = None
    short: str | None = None
    panel: str | None = None
    metavar: str | None = None
    shown_default: str | None = None
    envvar: str | None = None
    choices: tuple[str, ...] | None = None
    is_size: bool = False

    def allows(self, value: Any) -> bool:
        """Return whether a number is within the bounds."""
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    @property
    def range(self) -> str:
        """The bounds in words."""
        bounds = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)


@dataclass(frozen=True)
class Foreign:
    """A keyword of vLLM's that is taken only where it asks for nothing.

    Attributes:
        remedy: what to do instead.
        allowed: values beside None that ask for what is done anyway; None for all, of a keyword without effect here.
    """

    remedy: str
    allowed: tuple[Any, ...] | None = ()

    def check(self, name: str, value: Any) -> None:
        """Refuse other values.

        Raises:
            ValueError: the keyword, the value and the remedy.
        """
        if value is None or self.allowed is None:
            return
        if not any(type(value) is type(one) and value == one for one in self.allowed):
            raise ParameterError(name, f"{name} is {value!r:.60}, which is not supported; {self.remedy}")


def setting(default: Any = dataclasses.MISSING, help: str = "", **facts: Any) -> Any:
    """Declare a dataclass field with the facts of a `Setting`."""
    return field(default=default, metadata={_KEY: Setting(help, **facts)})


def settings_of(owner: Any) -> dict[str, tuple["dataclasses.Field[Any]", Setting]]:
    """Fields of a dataclass that are settings, by name."""
    return _declared(owner if isinstance(owner, type) else type(owner))


@functools.cache
def _declared(owner: type) -> dict[str, tuple["dataclasses.Field[Any]", Setting]]:
    return {each.name: (each, each.metadata[_KEY]) for each in dataclasses.fields(owner) if _KEY in each.metadata}


def check_settings(owner: Any) -> None:
    """Check every setting of a dataclass by its type and bounds, and turn numbers of numpy into Python's.

    Raises:
        ValueError: the setting, its value, and what it must be.
    """
    for name, (each, facts) in settings_of(owner).items():
        object.__setattr__(owner, name, checked(name, getattr(owner, name), each.type, facts))


def checked(name: str, value: Any, kind: Any, facts: Setting) -> Any:
    """Return a value of a type, if it is one and within the bounds.

    Args:
        kind: bool, int, float, a `Literal`, or one of these or None; a value of another type is returned as it is.

    Raises:
        ValueError: it is not.
    """
    takes = _taken(kind)
    if value is None and takes.none:
        return None
    if takes.choices:
        if not any(value is choice or (isinstance(value, str) and value == choice) for choice in takes.choices):
            words = (
                "True or False" if takes.choices == (True, False) else f"one of {', '.join(map(str, takes.choices))}"
            )
            raise ParameterError(name, f"{name} is {value!r}; it must be {facts.wanted or words}")
        return value
    if takes.number is None:
        return value
    is_float = takes.number is float
    value = _number(name, value) if is_float else whole_number(name, value)
    # NaN does not fit either.
    fits = abs(value) <= (sys.float_info.max if is_float else MAX_WHOLE)
    if not facts.allows(value) or (is_float and not fits):
        raise ParameterError(name, f"{name} is {value!r}; it must be {facts.wanted or facts.range}")
    if not fits:
        raise ParameterError(name, f"{name} is {value!r}; it must be below 2^63")
    return value


class _Taken(NamedTuple):
    """Values that a type allows.

    Attributes:
        none: whether it takes None.
        choices: the values that it takes, if it is a choice.
        number: float or int, if it takes numbers alone.
    """

    none: bool
    choices: tuple[Any, ...]
    number: type[float] | type[int] | None


@functools.cache
def _taken(kind: Any) -> _Taken:
    # Remembered, because each request's parameters are checked by some 30 types.
    kinds = [each for each in kinds_of(kind) if each is not NoneType]
    choices: tuple[Any, ...] = ()
    if all(each is bool or get_origin(each) is Literal for each in kinds):
        choices = (*((True, False) if bool in kinds else ()), *(choice for each in kinds for choice in get_args(each)))
    number = (float if float in kinds else int) if {int, float}.issuperset(kinds) else None
    return _Taken(len(kinds) < len(kinds_of(kind)), choices, number)


def size_in_bytes(name: str, given: object) -> object:
    """Return a size in bytes, where it is a text: digits, or a number with a unit, such as 1.5GiB or 800MB.

    Raises:
        ValueError: another text.
    """
    if not isinstance(given, str):
        return given
    found = _SIZE.fullmatch(given.strip())
    if found is None or (found[2] is None and not found[1].isdecimal()):
        raise ParameterError(name, f"{name} is {given!r}; it must be a number of bytes, or a size such as 4GiB")
    unit = (found[2] or "").upper()
    power = "KMGT".index(unit[0]) + 1 if unit else 0
    return int(float(found[1]) * (1000 if unit[1:] == "B" else 1024) ** power) if unit else int(found[1])


def unknown_name(what: str, name: str, known: Collection[str]) -> ValueError:
    """Return the error for a keyword or key that is not known; it names the nearest known one."""
    # Imported late: only mistakes need it.
    from difflib import get_close_matches

    (nearest,) = get_close_matches(name, known, n=1, cutoff=0)
    return ValueError(f"{what} has no {name!r}; the nearest it has is {nearest!r}")


def check_call(foreign: Mapping[str, Foreign] | None = None) -> Callable[[Call], Call]:
    """Have a method refuse arguments that it does not take with a `ValueError` of one line, where Python raises a
    `TypeError`.

    Args:
        foreign: keywords that are checked and left out.
    """

    def decorate(function: Call) -> Call:
        signature = inspect.signature(function)
        parameters = signature.parameters.values()
        known = [each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)]
        known.remove("self")
        what, others = function.__qualname__.removesuffix(".__init__"), foreign or {}
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)

        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            for name in [name for name in keywords if name in others]:
                others[name].check(name, keywords.pop(name))
            for name in keywords:
                if name not in known and not takes_any:
                    raise unknown_name(what, name, known)
            try:
                return function(*args, **keywords)
            except TypeError:
                # Bind only after a failure, since it takes longer than most calls: did the call fail, or its body?
                try:
                    signature.bind(*args, **keywords)
                except TypeError as error:
                    raise ValueError(f"{what}: {error}") from None
                raise

        return call  # type: ignore[return-value]

    return decorate


def checked_keywords(foreign: Mapping[str, Foreign] | None = None) -> Callable[[type[Owner]], type[Owner]]:
    """Have a dataclass refuse keywords that it has no field for; see `check_call`."""

    def decorate(owner: type[Owner]) -> type[Owner]:
        owner.__init__ = check_call(foreign)(owner.__init__)  # type: ignore[method-assign]
        return owner

    return decorate


def kinds_of(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, or a type alone."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def whole_number(name: str, value: Any, field: str | None = None) -> int:
    """Return a whole number, of Python or numpy, as Python's.

    Args:
        field: the parameter, if `name` is not its name.

    Raises:
        ParameterError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ParameterError(field or name, f"{name} is {value!r}; it must be a whole number")
    return int(value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ParameterError(name, f"{name} is {value!r}; it must be a number")
    return value if isinstance(value, int) else float(value)


def check_text(name: str, value: Any, field: str | None = None) -> None:
    """Refuse what is no text, and text that has no UTF-8 form.

    Args:
        field: the parameter, if `name` is not its name.

    Raises:
        ParameterError: the place of the first character that has none.
    """
    if not isinstance(value, str):
        raise ParameterError(field or name, f"{name} is {value!r}; it must be text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ParameterError(
            field or name,
            f"{name} is not valid text: its character {error.start} is half of a pair, or a byte that is no UTF-8",
        ) from None
