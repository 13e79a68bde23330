"""The state of a training run on disk, from which a killed run resumes."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from specdec.kernels.types.settings import one_line
from specdec.train_eagle.data.prepared_data import write_json

FOLDER = "state"
PROGRESS = "progress.json"
# As accelerate names the weights in a checkpoint.
WEIGHTS = "pytorch_model.bin"


class SavedRun(NamedTuple):
    """The last checkpoint of a run.

    Attributes:
        folder: its folder.
        settings: the run's settings.
        step: number of optimizer steps done.
        best_tau: best tau of the evaluations so far.
    """

    folder: Path
    settings: dict[str, Any]
    step: int
    best_tau: float

    def head(self) -> dict[str, Tensor]:
        """Return the tensors of the head by their names in it, mapped from the file."""
        file = self.folder / WEIGHTS
        try:
            tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # pickle and zip raise many exceptions
            raise ValueError(f"{file}: not the weights of a run: {one_line(error)}; train again") from None
        inside = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
        return {name.removeprefix("head."): value for name, value in inside.items() if name.startswith("head.")}


def saved_run(run: Path) -> SavedRun | None:
    """Return the last checkpoint of a run, None if it has none.

    Args:
        run: the run's folder, OUT/run.

    Raises:
        ValueError: the checkpoint is damaged.
    """
    steps = sorted((run / FOLDER).glob("step-*"))
    if not steps:
        return None
    file = steps[-1] / PROGRESS
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        return SavedRun(steps[-1], dict(kept["settings"]), kept["step"], kept["best_tau"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{file}: not the state of a run: {one_line(error)}; train again") from None


class TrainingState:
    """The state of a run: accelerate's checkpoint in a folder per step, of which the last is always complete.

    Attributes:
        step: number of optimizer steps done.
        best_tau: best tau of the evaluations so far.

    Args:
        run: the run's folder, OUT/run.
        settings: the run's settings, but for those that may change when it is resumed.
        resume: True: there must be a state; False: one that is there is not read; None: go on if there is one.

    Raises:
        ValueError: there is a run with other settings, which are named, or none although `resume` is True.
    """

    def __init__(self, run: Path, settings: Mapping[str, Any], resume: bool | None) -> None:
        self.run, self.settings = run, dict(settings)
        self.step, self.best_tau = 0, 0.0
        self._saved = saved_run(run) if resume is not False else None
        if self._saved is None:
            if resume:
                raise ValueError(f"{run}: holds no state to resume; leave out --resume to begin a run")
            return
        other = [name for name, value in self.settings.items() if self._saved.settings.get(name) != value]
        if other:
            told = "; ".join(f"{name}: {self._saved.settings.get(name)}, not {self.settings[name]}" for name in other)
            kept = f"{run} holds a run with another {told}"
            raise ValueError(f"{kept}; give its settings, another folder, or --no-resume to replace it")
        self.step, self.best_tau = self._saved.step, self._saved.best_tau

    def load(self, accelerator: Accelerator) -> None:
        """Restore head, optimizer and schedule, if there is a state."""
        if self._saved is not None:
            accelerator.load_state(str(self._saved.folder))

    def save(self, accelerator: Accelerator) -> None:
        """Write a checkpoint, and remove the one before it.

        Raises:
            OSError: it cannot be written; the one before it is left.
        """
        folder = self.run / FOLDER
        new, named = folder / "new", folder / f"step-{self.step:08d}"
        shutil.rmtree(new, ignore_errors=True)
        try:
            accelerator.save_state(str(new), safe_serialization=False)
        except RuntimeError as error:  # which torch.save raises where the disk is full
            raise OSError(f"{new}: cannot be written: {one_line(error)}") from None
        write_json(new / PROGRESS, {"settings": self.settings, "step": self.step, "best_tau": self.best_tau})
        new.rename(named)
        for old in folder.glob("step-*"):
            if old != named:
                shutil.rmtree(old)
