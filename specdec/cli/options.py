"""Options of commands, made of the settings that dataclasses declare."""

import dataclasses
import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand

from specdec.kernels.types.settings import Setting, kinds_of, settings_of

# In the order of the help.
PANELS = (
    "Arguments",
    "Data",
    "Model",
    "Drafts",
    "Sampling",
    "Training",
    "Benchmark",
    "Server",
    "Output",
    "Engine",
    "Limits",
    "Other",
)
# Names that options had, still accepted.
EARLIER = {f"--{name}": f"--draft-{name}" for name in ("depth", "branching", "nodes")}


def _show_info(value: bool) -> None:
    if value:
        logging.getLogger("specdec").setLevel(logging.INFO)


Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        callback=_show_info,
        rich_help_panel="Output",
        help="Say on standard error what is loaded, assumed and measured.",
    ),
]


def with_options(
    *owners: type, defaults: Mapping[str, str], also: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for every setting of these dataclasses; its `**options` takes them, None if not given.

    A setting without a default is required. Of two settings with one name the first is taken.

    Args:
        defaults: what the help says of the default, where that is not the field's.
        also: settings that are no options of other commands (`Setting.flags` is "").
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        own = {name: each for name, each in signature.parameters.items() if each.kind is not each.VAR_KEYWORD}
        made: dict[str, inspect.Parameter] = {}
        for owner in owners:
            for name, each in _options_of(owner, also).items():
                if name not in own and name not in made:
                    made[name] = _parameter(name, *each, defaults, getattr(owner, "PANEL", None))
        command.__signature__ = signature.replace(parameters=[*own.values(), *made.values()])  # type: ignore[attr-defined]
        return command

    return decorate


def options_for(owner: type, given: Mapping[str, Any], also: Collection[str] = ()) -> dict[str, Any]:
    """Return those of the given options that are settings of a dataclass; see `with_options`."""
    return {name: given[name] for name in _options_of(owner, also) if given.get(name) is not None}


def _options_of(owner: type, also: Collection[str]) -> dict[str, tuple[Any, Setting]]:
    return {name: each for name, each in settings_of(owner).items() if each[1].flags != "" or name in also}


def _parameter(
    name: str, field: Any, facts: Setting, defaults: Mapping[str, str], panel: str | None
) -> inspect.Parameter:
    default = defaults.get(name, facts.shown_default)
    is_required = field.default is dataclasses.MISSING and default is None
    if default is None and not is_required and field.default not in (None, ()) and not isinstance(field.default, bool):
        default = getattr(field.default, "name", str(field.default))
    flag = f"--{name.replace('_', '-')}"
    shown = facts.help if default is None else f"{facts.help.removesuffix('.')}; default: {default}."
    kind: Any = Literal[facts.choices] if facts.choices else str if facts.is_size else _kind(kinds_of(field.type))
    flags = [facts.flags] if facts.flags else [f"{flag}/--no-{flag[2:]}" if kind is bool else flag]
    option = typer.Option(
        *flags,
        *([facts.short] if facts.short else []),
        metavar=facts.metavar or _metavar(kind),
        envvar=facts.envvar,
        help=shown,
        show_default=False,
        rich_help_panel=facts.panel or panel,
    )
    annotation: Any = Annotated[kind if is_required else kind | None, option]
    empty = inspect.Parameter.empty if is_required else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=empty, annotation=annotation)


def _metavar(kind: Any) -> str | None:
    """Return what stands for an option's value: the choices, or what kind of value it is; None for a switch."""
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return {bool: None, int: "N", float: "X", list[float]: "X", Path: "PATH"}.get(kind, "TEXT")


def _kind(kinds: Sequence[Any]) -> type:
    """Return the type of an option's value; settings of any other type read text."""
    for kind in kinds:
        if get_origin(kind) is Sequence:
            return list[float] if get_args(kind) == (float,) else list[str]
    if len(kinds) == 1 and get_origin(kinds[0]) is Literal:
        return kinds[0]  # type: ignore[no-any-return]
    simple = [kind for kind in kinds if get_origin(kind) is not Literal and kind is not type(None)]
    return simple[0] if len(simple) == 1 and simple[0] in (bool, int, float, Path) else str


class Command(TyperCommand):
    """A command with its options in panels, which also takes their earlier names."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the panels one below the other; rich's boxes would cut the names of options on narrow terminals."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for each in self.get_params(ctx):
            record = each.get_help_record(ctx)
            if record is not None:
                rest = "Arguments" if each.param_type_name == "argument" else "Other"
                panels.setdefault(getattr(each, "rich_help_panel", None) or rest, []).append(record)
        for panel in sorted(panels, key=PANELS.index):
            with formatter.section(panel):
                formatter.write_dl(panels[panel])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {flag for each in self.params for flag in each.opts}
        words = []
        for word in args:
            name, equals, value = word.partition("=")
            is_earlier = name not in known and EARLIER.get(name) in known
            words.append(f"{EARLIER[name]}{equals}{value}" if is_earlier else word)
        return super().parse_args(ctx, words)


class SeveralValues(Command):
    """A command whose repeatable options also take several values: `--data a b` is `--data a --data b`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        repeatable = {flag for each in self.params if getattr(each, "multiple", False) for flag in each.opts}
        spread: list[str] = []
        option, count = "", 0
        for word in args:
            flag = word.partition("=")[0]
            if word.startswith("-") and not word[1:2].isdigit():
                option, count = (flag if flag in repeatable else ""), int("=" in word)
            elif option:
                spread += [option] if count else []
                count += 1
            spread.append(word)
        return super().parse_args(ctx, spread)
