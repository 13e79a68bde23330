"""Tells what kind of draft head a folder holds: by its config.json and its tensors, never by its name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from specdec.draft_heads.formats.eagle3_format import describe_eagle3
from specdec.draft_heads.formats.eagle_format import describe_eagle
from specdec.draft_heads.formats.foreign_heads import refuse_foreign
from specdec.draft_heads.formats.head_description import HeadDescription
from specdec.draft_heads.formats.head_settings import HeadSettings
from specdec.draft_heads.formats.head_tensors import VOCABULARY_MAPS, HeadTensors
from specdec.draft_heads.llama.checkpoint_files import (
    CheckpointError,
    check_weight_dtypes,
    error_context,
    listed,
    peek_tensors,
    read_config,
)

# Heads of speculators that this engine has, by what it calls them.
SPECULATORS_KINDS = {"eagle": "EAGLE-1/2", "eagle3": "EAGLE-3"}


def describe_folder(folder: Path) -> HeadDescription:
    """Recognise a head without reading its weights.

    Raises:
        CheckpointError: no head, or one that is not supported, with what was found instead.
    """
    settings = read_config(folder)
    with error_context(folder):
        refuse_foreign(settings)
    tensors = peek_tensors(folder, VOCABULARY_MAPS)
    with error_context(folder):
        description = recognise(settings, tensors)
        description.check()
    return description


def recognise(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> HeadDescription:
    """Recognise a head. That it is whole is for the description's `check` to see.

    Args:
        settings: its config.json.
        tensors: as the file names them; only maps of the vocabulary need numbers.

    Raises:
        CheckpointError: it is none, or one that is not supported, with what was found instead.
    """
    refuse_foreign(settings, tensors)
    check_weight_dtypes({name: x for name, x in tensors.items() if name.rpartition(".")[2] not in VOCABULARY_MAPS})
    own = HeadSettings.from_json(settings)
    found = HeadTensors(tensors)
    if _is_eagle3(found):
        described = describe_eagle3(own, found)
    elif "fc.weight" in found:
        described = describe_eagle(own, found)
    else:
        others = f"{len(tensors)} others ({listed(sorted(tensors)[:3])})"
        kind = f"model_type {settings.get('model_type')!r}"
        raise CheckpointError(f"not an EAGLE head: it has no tensor 'fc.weight', but {others} and {kind}")
    said = settings.get("speculators_model_type")
    if said is not None and not described.kind.startswith(SPECULATORS_KINDS.get(said, "?")):
        raise CheckpointError(f"speculators_model_type is {said!r}, the tensors are those of an {described.kind} head")
    return described


def _is_eagle3(tensors: HeadTensors) -> bool:
    """Whether attention takes embedding and state side by side."""
    if tensors.has("hidden_norm.weight") or any("midlayer." in name for name in tensors.spellings.values()):
        return True
    query, fc = (tensors.by_name.get(name) for name in ("layers.0.self_attn.q_proj.weight", "fc.weight"))
    if query is None or fc is None or query.ndim != 2 or fc.ndim != 2:
        return False
    return query.shape[1] == 2 * fc.shape[0]
