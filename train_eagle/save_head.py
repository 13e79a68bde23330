"""Writes a head in the official layout of its kind."""

from pathlib import Path
from typing import Any

import torch

from specdec.draft_heads.formats.eagle3_checkpoint import save_eagle3_head
from specdec.draft_heads.formats.eagle_checkpoint import save_eagle_head
from specdec.draft_heads.heads.eagle import EagleHead
from specdec.draft_heads.heads.eagle3 import Eagle3Head


def save_head(
    head: EagleHead | Eagle3Head, folder: Path, settings: dict[str, Any], dtype: torch.dtype = torch.bfloat16
) -> None:
    """As `config.json` and `model.safetensors`.

    Args:
        settings: extra keys for config.json.

    Raises:
        ValueError: the head has what that layout cannot say.
    """
    if isinstance(head, EagleHead):
        save_eagle_head(head, folder, settings, dtype)
    else:
        save_eagle3_head(head, folder, settings, dtype)
