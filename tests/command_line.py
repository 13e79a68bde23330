"""Commands of specdec, run in this process."""

import json
from collections.abc import Callable
from typing import NamedTuple

import pytest

from specdec.cli.app import main

SETTINGS = ("SPECDEC_MODEL", "SPECDEC_DRAFT", "SPECDEC_LOG_LEVEL")
OUTPUT = ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "COLUMNS")


class Result(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def objects(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.out.splitlines()]


Run = Callable[..., Result]


def run_command(
    capsys: pytest.CaptureFixture[str], *words: object, program: Callable[[list[str]], object] = main
) -> Result:
    """Run `specdec`, or another program, with these words until it exits."""
    with pytest.raises(SystemExit) as exited:
        program([*map(str, words)])
    assert isinstance(exited.value.code, int)
    return Result(exited.value.code, *capsys.readouterr())


def unset_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the variables of the environment that commands read."""
    for name in (*SETTINGS, *OUTPUT):
        monkeypatch.delenv(name, raising=False)
