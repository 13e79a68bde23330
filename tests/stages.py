"""Stages of training, run in this process as `python -m specdec.train_eagle.STAGE` runs them."""

from collections.abc import Sequence
from importlib import import_module

from specdec.train_eagle.stage_command import run_stage


def run(stage: str, words: Sequence[object]) -> None:
    """Run a stage; SystemExit if it fails."""
    command = getattr(import_module(f"specdec.train_eagle.{stage}"), stage)
    try:
        run_stage(command, [str(word) for word in words])
    except SystemExit as ended:
        if ended.code:
            raise
