"""The state of a training run on disk, from which a killed run resumes."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from specdec.train_eagle.prepared_data import write_whole

FILE = "training_state.pt"


def begin_with(head: nn.Module, run: Path) -> None:
    """Copy the weights of another run's head into a head.

    Raises:
        ValueError: there is no such run, or its head has other sizes.
    """
    file = run / FILE
    if not file.is_file():
        raise ValueError(f"{run}: holds no {FILE}; start names the folder of a run, OUT/run")
    try:
        head.load_state_dict(torch.load(file, map_location="cpu", weights_only=True)["head"])
    except RuntimeError as error:
        raise ValueError(f"{run}: its head does not fit: {str(error).splitlines()[1].strip()}") from None


class TrainingState:
    """The state of a run, in one file that is always complete.

    Attributes:
        step: number of optimizer steps done.
        best_tau: best tau of the evaluations so far.
    """

    def __init__(self, file: Path, settings: dict[str, Any]) -> None:
        self.file, self.settings = file, settings
        self.step = 0
        self.best_tau = 0.0

    def load(self, head: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Resume from the file if there is one.

        Raises:
            ValueError: the file is of a run with other settings, which are named.
        """
        if not self.file.exists():
            return
        kept = torch.load(self.file, map_location="cpu", weights_only=True)
        other = [name for name, value in self.settings.items() if kept["settings"].get(name) != value]
        if other:
            raise ValueError(
                f"{self.file.parent} holds a run with another {', '.join(other)}; give its settings, or another folder"
            )
        head.load_state_dict(kept["head"])
        optimizer.load_state_dict(kept["optimizer"])
        self.step, self.best_tau = kept["step"], kept["best_tau"]

    def save(self, head: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        kept = {
            "settings": self.settings,
            "head": head.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": self.step,
            "best_tau": self.best_tau,
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.file, lambda new: torch.save(kept, new))
