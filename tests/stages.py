"""Stages of training, run in this process, as `python -m specdec.train_eagle.STAGE` runs them or by their settings."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from specdec.train_eagle.data.preparation import prepare as write_prepared
from specdec.train_eagle.data.prepared_data import PreparedData
from specdec.train_eagle.data.stage_settings import PrepareSettings
from specdec.train_eagle.stage_command import run_stage


def run(stage: str, words: Sequence[object]) -> None:
    """Run a stage; SystemExit if it fails."""
    command = getattr(import_module(f"specdec.train_eagle.{stage}"), stage)
    try:
        run_stage(command, [str(word) for word in words])
    except SystemExit as ended:
        if ended.code:
            raise


def prepare(model: Path, sources: Sequence[Path], out: Path, shard_size: int = 2048, **settings: Any) -> PreparedData:
    """Write tokens and masks of conversations."""
    data = [str(source) for source in sources]
    return write_prepared(model, PrepareSettings(data=data, out=out, **settings), shard_size)
