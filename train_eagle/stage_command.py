"""A stage of training as a command, of `specdec` or by `python -m`."""

import os
from collections.abc import Callable, Sequence
from typing import NoReturn

import typer

from specdec.cli.options import SeveralValues
from specdec.cli.program import run_program
from specdec.kernels.types.extras import lacking

_NAMES = ("accelerate", "datasets", "matplotlib", "pydantic", "tensorboardX")
_PACKAGES = {name: name for name in _NAMES} | {"yaml": "pyyaml"}


def need_extra(stage: str) -> None:
    """Refuse to run a stage without the packages that training needs.

    Raises:
        ValueError: names those that are missing, and what to install.
    """
    if problem := lacking(stage, "train", _PACKAGES):
        raise ValueError(problem)


def let_threads_sleep() -> None:
    """Let torch's threads sleep while they wait for each other; to be called before torch is first imported.

    By default a thread of OpenMP spins at the end of every operation until the others are there too. Where other
    programs use the machine, one of these has no processor, and the spinning takes most of the time that there is.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def run_stage(command: Callable[..., None], args: Sequence[str] | None = None) -> NoReturn:
    """Run a stage as a program of its own; it ends like `specdec`.

    Args:
        args: None for those of the process.
    """
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(cls=SeveralValues)(command)
    name = command.__name__
    run_program(app, args, name, f"python -m specdec.train_eagle.{name}")
