"""Every command and option has help and stands in the README."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from specdec.cli.app import app

README = Path(__file__).parents[1] / "README.md"
GROUP: Any = typer.main.get_command(app)


def _parameters() -> Iterator[tuple[str, Any]]:
    for command in (GROUP, *GROUP.commands.values()):
        for parameter in command.params:
            yield f"{command.name} {parameter.name}", parameter


PARAMETERS = dict(_parameters())


def test_the_commands_are_found() -> None:
    assert "generate" in GROUP.commands
    assert {"generate model", "generate prompt"} <= set(PARAMETERS)


@pytest.mark.parametrize("name", GROUP.commands)
def test_command_has_help_and_examples(name: str) -> None:
    assert f"\n  specdec {name} " in GROUP.commands[name].help.split("Examples:")[1]


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_has_help(name: str) -> None:
    assert PARAMETERS[name].help


@pytest.mark.parametrize("name", GROUP.commands)
def test_command_is_in_the_readme(name: str) -> None:
    assert f"specdec {name}" in README.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PARAMETERS)
def test_option_is_in_the_readme(name: str) -> None:
    text = README.read_text(encoding="utf-8")
    parameter = PARAMETERS[name]
    for flag in (*parameter.opts, *parameter.secondary_opts):
        if flag.startswith("--"):
            assert re.search(rf"(?<![\w-]){flag}(?![\w-])", text), flag
    if parameter.envvar:
        assert parameter.envvar in text
