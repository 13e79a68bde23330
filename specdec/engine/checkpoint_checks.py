"""Checks of target, draft model and tokenizer by their files, before any weight is read."""

from pathlib import Path

from specdec.draft_heads.formats.head_kinds import fitting_head, kind_of
from specdec.draft_heads.formats.head_settings import HeadSettings
from specdec.draft_heads.formats.head_tensors import HeadTensors
from specdec.draft_heads.llama.checkpoint_files import CheckpointError, error_context, read_config, read_tensors
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.models.checkpoint import has_tokenizer
from specdec.models.gguf_file import is_gguf
from specdec.models.hub import shown_path
from specdec.models.llama import read_llama_config
from specdec.models.llama_draft import holds_llama


def check_target(folder: Path) -> LlamaConfig:
    """Check that a checkpoint is whole by the sizes of its files, and a model that can be a target; return its sizes.

    Raises:
        CheckpointError: no model, a head, another family, or files that are missing or cut off.
    """
    if is_gguf(folder):
        # To open it is to check it.
        return read_llama_config(folder)
    settings = read_config(folder)
    tensors = read_tensors(folder)
    with error_context(folder):
        said = HeadSettings.from_json(settings)
        head = kind_of(said, HeadTensors(tensors))
        if head is not None:
            named = said.verifier or said.training.get("target")
            target = f"its target, {named}," if named else "its target"
            raise CheckpointError(
                f"a draft head ({head.label}) and no model; give {target} as the model, and this folder as the draft"
            )
    return read_llama_config(folder)


def check_draft(folder: Path, target: LlamaConfig, window: int | None) -> None:
    """Check that a folder or file holds a head or small model that fits a target.

    Args:
        window: as for `load_head`.

    Raises:
        CheckpointError: it holds neither, or one for another target, or files that are missing or cut off.
    """
    if not holds_llama(folder):
        fitting_head(folder, target, window)
        return
    own = read_llama_config(folder).vocab_size
    if own != target.vocab_size:
        raise CheckpointError(
            f"{shown_path(folder)}: a whole model and no head; as a small model that drafts it would need the target's "
            f"tokens, but its vocab_size is {own} and the target's {target.vocab_size}"
        )


def check_tokenizer(folder: Path) -> None:
    """Check that a checkpoint has a tokenizer.

    Raises:
        CheckpointError: it has none.
    """
    if not has_tokenizer(folder):
        raise CheckpointError(f"{folder}: no tokenizer.json; give prompts as token ids, or add the tokenizer")
