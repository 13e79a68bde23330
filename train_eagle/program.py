"""The whole program: the commands of the engine, and the stages of training.

It stands in the topmost layer, because the engine's own command line may not import training.
"""

from collections.abc import Sequence
from typing import NoReturn

from specdec.cli.app import app
from specdec.cli.options import SeveralValues
from specdec.cli.program import run_program
from specdec.train_eagle.evaluate import evaluate
from specdec.train_eagle.export import export
from specdec.train_eagle.prepare import prepare
from specdec.train_eagle.regenerate import regenerate
from specdec.train_eagle.train import train

__all__ = ["app", "main"]

# In the order in which they run.
STAGES = (regenerate, prepare, train, evaluate, export)
for stage in STAGES:
    app.command(cls=SeveralValues)(stage)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the console script: exit code 2 and one line on standard error for bad input, 130 after Ctrl-C."""
    run_program(app, args, "specdec")
