"""Tables of the command line's options and of the settings of the Python API, from the code that declares them."""

from collections.abc import Callable
from dataclasses import MISSING
from functools import partial
from typing import Any

import typer

from docs.generator.regions import table
from specdec.cli.model_options import DRAFT_HELP
from specdec.config import EngineConfig
from specdec.core.request_limits import RequestLimits
from specdec.core.sampling_params import BeamSearchParams, SamplingParams, Speculation
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.kernels.types.settings import settings_of
from specdec.scheduling.scheduler_config import SchedulerConfig
from specdec.train_eagle.program import app

GROUP: Any = typer.main.get_command(app)
BENCH = "bench"
# Commands of which only the options are listed that `generate` does not have in the same words.
BESIDE_GENERATE = ("chat", "trace", "profile", "serve", "regenerate")
# Arguments of `LLM` that are not keywords of settings, described by hand.
POSITIONAL = ("model", "draft")
OWNERS = {
    "settings-llm": (EngineConfig, SchedulerConfig, RequestLimits),
    "settings-shape": (DraftShape,),
    "settings-sampling": (SamplingParams,),
    "settings-speculation": (Speculation,),
    "settings-beams": (BeamSearchParams,),
}


def option_table(command: str) -> str:
    """Return a command's arguments and options: spelling, meaning, default."""
    known = _rows("generate") if command in BESIDE_GENERATE else []
    return table(["option", "meaning", "default"], [row for row in _rows(command) if row not in known])


def bench_table() -> str:
    """Return the options of the sub-commands of `bench`, without those that `generate` has in the same words."""
    known = _rows("generate")
    users: dict[tuple[str, ...], list[str]] = {}
    for name, command in GROUP.commands[BENCH].commands.items():
        for row in map(_row, command.params):
            if row not in known:
                users.setdefault(tuple(row), []).append(name)
    total = len(GROUP.commands[BENCH].commands)
    rows = [[row[0], "all" if len(names) == total else ", ".join(names), *row[1:]] for row, names in users.items()]
    return table(["option", "of", "meaning", "default"], rows)


def _rows(command: str) -> list[list[str]]:
    return [_row(parameter) for parameter in GROUP.commands[command].params]


def _row(parameter: Any) -> list[str]:
    is_flag = getattr(parameter, "is_flag", False)
    flags = [flag for flag in parameter.opts if flag.startswith("-")]
    spelling = " / ".join(", ".join(each) for each in (flags, parameter.secondary_opts) if each)
    spelling = spelling or parameter.metavar or parameter.name.upper()
    if flags and not is_flag:
        spelling += f" {parameter.metavar or _kind(parameter)}"
    meaning, _, default = (parameter.help or "").removesuffix(".").partition("; default: ")
    if parameter.envvar:
        meaning += f" (environment variable: `{parameter.envvar}`)"
    if not default and isinstance(parameter.default, str | int | float) and not isinstance(parameter.default, bool):
        default = str(parameter.default)
    return _cells(f"`{spelling}`", meaning, default)


def _kind(parameter: Any) -> str:
    """Return what stands for an option's value; typer names types in one way or another, by its version."""
    descriptor = getattr(parameter, "type_descriptor", None)
    name: str = descriptor.annotation.__name__ if descriptor else parameter.type.name
    return {"int": "N", "integer": "N", "float": "X", "str": "TEXT", "list": "TEXT"}.get(name, name.upper())


def settings_table(*owners: type) -> str:
    """Return the settings that dataclasses declare: name, meaning, allowed values, default."""
    rows = []
    for owner in owners:
        for name, (field, facts) in settings_of(owner).items():
            if name not in POSITIONAL:
                default = "by device" if name == "shape" else facts.shown_default
                if default is None and field.default is not MISSING:
                    default = f"`{field.default!r}`"
                allowed = facts.wanted or facts.range
                rows.append(_cells(f"`{name}`", facts.help.removesuffix("."), allowed, default or ""))
    return table(["name", "meaning", "allowed", "default"], rows)


def _cells(*texts: str) -> list[str]:
    return [text.replace("|", "\\|") for text in texts]


PARTS: dict[str, Callable[[], str]] = {
    **{f"options-{name}": partial(option_table, name) for name in GROUP.commands if name != BENCH},
    f"options-{BENCH}": bench_table,
    **{name: partial(settings_table, *owners) for name, owners in OWNERS.items()},
    "draft-help": lambda: DRAFT_HELP,
}
