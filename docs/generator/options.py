"""Tables of the command line's options, from the commands themselves."""

from typing import Any

import typer

from docs.generator.regions import table
from specdec.cli.app import app

GROUP: Any = typer.main.get_command(app)


def option_table(command: str) -> str:
    """Return a command's arguments and options: spelling, meaning, default."""
    return table(["option", "meaning", "default"], [_row(parameter) for parameter in GROUP.commands[command].params])


def _row(parameter: Any) -> list[str]:
    is_flag = getattr(parameter, "is_flag", False)
    flags = [flag for flag in (*parameter.opts, *parameter.secondary_opts) if flag.startswith("--")]
    spelling = " / ".join(flags) or parameter.metavar or parameter.name.upper()
    if flags and not is_flag:
        spelling += f" {parameter.metavar or _kind(parameter)}"
    meaning, _, default = (parameter.help or "").removesuffix(".").partition("; default: ")
    if parameter.envvar:
        meaning += f" (environment variable: `{parameter.envvar}`)"
    return [text.replace("|", "\\|") for text in (f"`{spelling}`", f"{meaning}.", default)]


def _kind(parameter: Any) -> str:
    """Return what stands for an option's value; typer names types in one way or another, by its version."""
    descriptor = getattr(parameter, "type_descriptor", None)
    name: str = descriptor.annotation.__name__ if descriptor else parameter.type.name
    return {"int": "N", "integer": "N", "float": "X", "str": "TEXT", "text": "TEXT"}.get(name, name.upper())


PARTS = {f"options-{name}": lambda name=name: option_table(name) for name in GROUP.commands}
