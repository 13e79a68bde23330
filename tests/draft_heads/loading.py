"""Loading a head in float64 for the target of `tests.checkpoints`."""

from pathlib import Path

import torch

from specdec.draft_heads.formats.head_kind import LoadedHead
from specdec.draft_heads.formats.head_kinds import load_head
from specdec.draft_heads.heads.draft_head import TargetParts
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.kernels.reference.projection import Projection
from tests.checkpoints import TARGET_EMBED, TARGET_LAYERS, TARGET_OUT, llama_config
from tests.head_formats import FORMATS
from tests.kernel_sets import TORCH

CPU = torch.device("cpu")
TARGET = LlamaConfig.from_json(llama_config(FORMATS["official_eagle3"]().head, num_hidden_layers=TARGET_LAYERS))
PARTS = TargetParts(TARGET_EMBED.double(), Projection(TARGET_OUT.double()), TARGET)


def load(folder: Path) -> LoadedHead:
    return load_head(folder, PARTS, TORCH)
