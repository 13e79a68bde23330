"""Checks of a target and of what drafts for it by their files, before any weight is read."""

from pathlib import Path

from specdec.draft_heads.formats.head_kinds import check_not_head, read_head
from specdec.draft_heads.llama.checkpoint_files import CheckpointError, error_context, read_config
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.draft_heads.llama.weight_files import has_weights, read_tensors
from specdec.gguf.file import is_gguf
from specdec.models.checkpoint import has_tokenizer, read_settings
from specdec.models.head_fit import check_fit
from specdec.models.hub import shown_path
from specdec.models.llama import read_llama_config
from specdec.models.llama_draft import holds_llama
from specdec.models.tokenizer import check_same_vocabulary
from specdec.models.tp_plan import Shard, TPPlan, plan_of
from specdec.parallel.rank_layout import RankLayout


def check_target(folder: Path) -> LlamaConfig:
    """Check that a checkpoint is a model, all of whose files are there and whole; return its sizes.

    Raises:
        CheckpointError: no model, a head, another family, or files that are missing or cut off.
    """
    # To open a GGUF file is to check it.
    if is_gguf(folder):
        return read_llama_config(folder)
    settings = read_config(folder)
    is_whole = has_weights(folder)
    if is_whole:
        tensors = read_tensors(folder)
        with error_context(folder):
            check_not_head(settings, tensors)
    config = read_llama_config(folder)
    if not is_whole:
        # What no download would mend comes first; this says which files are missing.
        read_tensors(folder)
    return config


def check_draft(folder: Path, target: Path, sizes: LlamaConfig) -> str:
    """Check that a folder or file holds a head or small model that fits a target; return its kind's name.

    Args:
        sizes: those of the target.

    Raises:
        CheckpointError: it holds neither, or one for another target, or files that are missing or cut off.
    """
    if not holds_llama(folder):
        head = read_head(folder)
        check_fit(head, folder, target)
        with error_context(folder):
            head.check()
        return head.kind.name
    own = read_llama_config(folder).vocab_size
    if own != sizes.vocab_size and not (has_tokenizer(folder) and has_tokenizer(target)):
        raise CheckpointError(
            f"{shown_path(folder)}: a whole model and no head, which drafts by the target's tokens; but the draft "
            f"model's vocab_size {own} does not fit the target's {sizes.vocab_size}; take "
            "one whose vocab_size is the target's, or put the tokenizer.json of each into its folder"
        )
    check_same_vocabulary(folder, target)
    return "draft_model"


def check_split(folder: Path, target: LlamaConfig, layout: RankLayout) -> None:
    """Check that a target can be split over ranks.

    Raises:
        ValueError: heads, neurons or layers that cannot be shared.
    """
    plan = plan_of(read_settings(folder), target) if layout.tensor > 1 else TPPlan({})
    Shard.of(target, 0, layout.tensor, plan, 0, layout.stages)
