"""Options of commands, made of the settings that dataclasses declare."""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_origin

import typer

from specdec.kernels.settings import Setting, kinds_of, settings_of


def _show_info(value: bool) -> None:
    if value:
        logging.getLogger("specdec").setLevel(logging.INFO)


Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose", "-v", callback=_show_info, help="Say on standard error what is loaded, assumed and measured."
    ),
]


def with_options(*owners: type, defaults: Mapping[str, str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for every setting of these dataclasses; its `**options` takes them, None if not given.

    Args:
        defaults: what the help says of the default, where that is not the field's.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        made = [_parameter(name, *each, defaults) for owner in owners for name, each in _options_of(owner).items()]
        command.__signature__ = signature.replace(parameters=[*own, *made])  # type: ignore[attr-defined]
        return command

    return decorate


def options_for(owner: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the given options that are settings of a dataclass."""
    return {name: given[name] for name in _options_of(owner) if given.get(name) is not None}


def _options_of(owner: type) -> dict[str, tuple[Any, Setting]]:
    return {name: each for name, each in settings_of(owner).items() if each[1].flags != ""}


def _parameter(name: str, field: Any, facts: Setting, defaults: Mapping[str, str]) -> inspect.Parameter:
    default = defaults.get(name, facts.shown_default)
    if default is None and field.default not in (None, ()) and not isinstance(field.default, bool):
        default = getattr(field.default, "name", str(field.default))
    flags = [facts.flags] if facts.flags else []
    shown = facts.help if default is None else f"{facts.help.removesuffix('.')}; default: {default}."
    kind: Any = _kind(kinds_of(field.type))
    option = typer.Option(*flags, metavar=facts.metavar, help=shown, show_default=False)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _kind(kinds: Sequence[Any]) -> type:
    """Return the type of an option's value; settings of any other type read text."""
    if any(get_origin(kind) is Sequence for kind in kinds):
        return list[str]
    simple = [kind for kind in kinds if get_origin(kind) is not Literal and kind is not type(None)]
    return simple[0] if len(simple) == 1 and simple[0] in (bool, int, float) else str
