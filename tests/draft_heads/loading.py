"""Loading a head in float64 for the target of `tests.checkpoints`."""

from pathlib import Path

import torch

from specdec.draft_heads.formats.load_draft import LoadedHead, load_head
from specdec.draft_heads.heads.draft_head import TargetParts
from specdec.kernels.linear import Projection
from tests.checkpoints import TARGET_EMBED, TARGET_LAYERS, TARGET_OUT

CPU = torch.device("cpu")
PARTS = TargetParts(TARGET_EMBED.double(), Projection(TARGET_OUT.double()), TARGET_LAYERS)


def load(folder: Path) -> LoadedHead:
    return load_head(folder, PARTS, torch.float64, CPU)
