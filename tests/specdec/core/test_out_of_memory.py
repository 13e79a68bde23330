"""Memory that cannot be had is told in one line with a remedy, whoever asked for it."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import typer

from specdec import LLM
from specdec.cli.program import run_program
from specdec.core.out_of_memory import explained_shortage, memory_shortage
from tests.specdec.tiny_checkpoints import Tiny

# More than any machine can address.
TOO_MANY = 1 << 60
CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 3 GiB is free."
    "\nOf the allocated memory 70 GiB is allocated by PyTorch."
)


def of_cuda() -> None:
    raise torch.OutOfMemoryError(CUDA)


def of_python() -> None:
    raise MemoryError


SHORTAGES: dict[str, tuple[Callable[[], Any], str]] = {
    "torch": (
        lambda: torch.empty(TOO_MANY, dtype=torch.uint8),
        "out of memory: 1.07e+09 GiB more cannot be had",
    ),
    "numpy": (lambda: np.empty(TOO_MANY, np.uint8), "out of memory"),
    "cuda": (of_cuda, "out of memory: 20.00 GiB more cannot be had"),
    "python": (of_python, "out of memory"),
}


@pytest.mark.parametrize("name", SHORTAGES)
def test_a_shortage_is_one_line(name: str) -> None:
    ask, line = SHORTAGES[name]
    with pytest.raises(ValueError, match=f"^{re.escape(line)}.*; take less$"), explained_shortage("take less"):
        ask()


def test_other_errors_stay() -> None:
    with pytest.raises(RuntimeError, match="shapes"), explained_shortage():
        raise RuntimeError("shapes do not fit")
    assert memory_shortage(ValueError("out of memory")) is None


@pytest.mark.parametrize("name", SHORTAGES)
def test_an_engine_that_finds_no_memory_is_a_value_error(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("specdec.building.build.load_target", lambda *_: SHORTAGES[name][0]())
    with pytest.raises(ValueError, match=r"^out of memory.*; lower kv_cache_memory, .*smaller model$"):
        LLM(tiny.target, None, dtype="float32", device="cpu")


@pytest.mark.parametrize("name", SHORTAGES)
def test_a_command_that_runs_out_ends_with_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def step() -> None:
        SHORTAGES[name][0]()

    with pytest.raises(SystemExit) as exited:
        run_program(app, [], "specdec")
    assert exited.value.code == 2
    assert re.fullmatch(r"specdec: out of memory[^\n]*; lower kv_cache_memory[^\n]*\n", capsys.readouterr().err)
