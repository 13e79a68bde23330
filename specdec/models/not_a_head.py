"""Refusal of a draft head that is given as a model."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from specdec.draft_heads.formats.head_kinds import kind_of
from specdec.draft_heads.formats.head_settings import HeadSettings
from specdec.draft_heads.formats.head_tensors import HeadTensors
from specdec.draft_heads.llama.checkpoint_files import CheckpointError


def check_not_head(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Check that a folder holds no draft head.

    Args:
        settings: its config.json.
        tensors: its tensors, which are not read.

    Raises:
        CheckpointError: it does; names the head's target, if config.json does.
    """
    said = HeadSettings.from_json(settings)
    head = kind_of(said, HeadTensors(tensors))
    if head is None:
        return
    named = said.verifier or said.training.get("target")
    target = f"its target, {named}," if named else "its target"
    raise CheckpointError(f"a draft head ({head.label}) and no model; give it as the draft, and {target} as the model")
