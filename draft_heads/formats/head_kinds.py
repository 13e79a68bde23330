"""All kinds of draft heads, and how a folder is recognised as one of them: by content, never by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from specdec.draft_heads.formats.block import BlockKind, DFlash2Kind, DFlashKind, DominoKind, DSparkKind
from specdec.draft_heads.formats.eagle import EagleKind
from specdec.draft_heads.formats.eagle3 import Eagle3Kind
from specdec.draft_heads.formats.foreign_heads import foreign_kind
from specdec.draft_heads.formats.head_kind import HeadDescription, HeadKind, LoadedHead
from specdec.draft_heads.formats.head_settings import HeadSettings
from specdec.draft_heads.formats.head_tensors import HeadTensors
from specdec.draft_heads.formats.quantized_head import is_fp8, plain_weights
from specdec.draft_heads.heads.draft_head import TargetParts
from specdec.draft_heads.llama.checkpoint_files import (
    WEIGHT_DTYPES,
    CheckpointError,
    check_weight_dtypes,
    error_context,
    listed,
    read_config,
)
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.draft_heads.llama.weight_files import read_tensors
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.types.registry import Registry

# By name. The first that recognises a folder describes it; a plug-in's come before the built-in ones.
KINDS: Registry[HeadKind[Any, Any]] = Registry(
    "head kind",
    {kind.name: kind for kind in (Eagle3Kind(), DSparkKind(), DominoKind(), DFlash2Kind(), DFlashKind(), EagleKind())},
)


def load_head(folder: Path, target: TargetParts, kernels: KernelSet, window: int | None = None) -> LoadedHead:
    """Load a head of any kind.

    Args:
        window: most tokens that its layers see; None for as many as config.json says.

    Raises:
        CheckpointError: no head, or none that is supported and fits the target, with the reason.
    """
    found = fitting_head(folder, target.config, window)
    with error_context(folder):
        found.check_finite(target.embedding.dtype)
        return found.kind.build(found, target, kernels)


def fitting_head(folder: Path, target: LlamaConfig, window: int | None = None) -> HeadDescription[Any]:
    """Recognise a complete head that fits a target, without reading its weights.

    Args:
        window: as for `load_head`.

    Raises:
        CheckpointError: as `load_head`.
    """
    found = read_head(folder)
    with error_context(folder):
        found.check(target)
        return found.limited_to(target.max_position, window)


def describe_folder(folder: Path) -> HeadDescription[Any]:
    """Recognise a complete head without reading its weights.

    Raises:
        CheckpointError: no head, or one that is not supported, with what was found instead.
    """
    description = read_head(folder)
    with error_context(folder):
        description.check()
    return description


def read_head(folder: Path) -> HeadDescription[Any]:
    """Recognise a head. The description's `check` then tells whether it is complete.

    Raises:
        CheckpointError: as `describe_folder`.
    """
    settings = read_config(folder)
    with error_context(folder):
        plain = {**settings, "quantization_config": None}
        _refuse_foreign(plain)
    tensors = read_tensors(folder)
    with error_context(folder):
        # Trainers copy the target's setting to heads that are not quantised. What is quantised otherwise than in
        # 8-bit floats is refused by name.
        is_plain = all(tensor.dtype in WEIGHT_DTYPES for tensor in _weights(tensors).values())
        own = plain if is_plain or is_fp8(settings) else settings
        return _recognise(own, plain_weights(settings, tensors))


def _recognise(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> HeadDescription[Any]:
    _refuse_foreign(settings, tensors)
    check_weight_dtypes(_weights(tensors))
    own, found = HeadSettings.from_json(settings), HeadTensors(tensors)
    kind = kind_of(own, found)
    if (
        kind is None
        and found.has_any("layers.0.mlp.")
        and {"embed_tokens.weight", "norm.weight"}.issubset(found.by_name)
    ):
        raise CheckpointError("not a draft head of a known kind: it holds a whole model; give the folder of a head")
    if kind is None:
        known = ", ".join(f"{one.sign!r} of {one.label}" for one in KINDS.values())
        held = f"{len(tensors)} others ({listed(sorted(tensors)[:3])}) and model_type {settings.get('model_type')!r}"
        raise CheckpointError(f"not a draft head of a known kind: no tensor {known}, but {held}")
    if "dflash_config" in settings and not isinstance(kind, BlockKind):
        raise CheckpointError(f"config.json has a dflash_config, the tensors are those of an {kind.label} head")
    described = kind.describe(own, found)
    said = settings.get("speculators_model_type")
    if said not in (None, kind.name):
        raise CheckpointError(f"speculators_model_type is {said!r}, the tensors are those of an {described.label} head")
    return described


def _weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors but for those of token ids."""
    id_maps = [name for kind in KINDS.values() for name in kind.id_maps]
    return {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] not in id_maps}


def kind_of(settings: HeadSettings, tensors: HeadTensors) -> HeadKind[Any, Any] | None:
    """Return the kind of head that a folder holds, None if it is of no known kind."""
    return next((kind for kind in KINDS.values() if kind.recognises(settings, tensors)), None)


def check_not_head(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Check that a folder given as a model holds no draft head.

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


def _refuse_foreign(settings: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
    foreign = foreign_kind(settings, tensors or ())
    if foreign is not None:
        supported = ", ".join(kind.label for kind in KINDS.values())
        raise CheckpointError(f"{foreign}; the kinds of heads that are supported: {supported}")
