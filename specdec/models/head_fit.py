"""Checks that a draft head fits a target, by its sizes and its tokens, without reading weights."""

from pathlib import Path
from typing import Any

from specdec.draft_heads.formats.head_kind import HeadDescription
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.models.hub import shown_path
from specdec.models.llama import read_llama_config
from specdec.models.tokenizer import vocabulary_digest

# Key of a head's recipe in config.json: `vocabulary_digest` of the target that it was trained for.
VOCABULARY = "vocabulary"


def check_fit(head: HeadDescription[Any], folder: Path, target: Path) -> LlamaConfig:
    """Check that a head was made for a target; return the target's shape.

    Args:
        folder: the head's folder.

    Raises:
        CheckpointError: names both, what differs, and the remedy.
    """
    sizes = read_llama_config(target)
    try:
        head.check_target(sizes)
    except CheckpointError as error:
        remedy = f"not a head for {shown_path(target)}; give the target that it was trained for by --model"
        raise CheckpointError(f"{folder}: {error}: {remedy}") from None
    training = head.settings.training
    check_vocabulary(str(folder), training.get("target"), training.get(VOCABULARY), target)
    return sizes


def check_vocabulary(what: str, made_for: object, vocabulary: object, target: Path) -> None:
    """Check that something made with the tokens of one target has those of another.

    Args:
        what: begins the message.
        made_for: name of the first target, if it is known.
        vocabulary: its `vocabulary_digest`; None if it is not known.

    Raises:
        CheckpointError: names both targets and the remedy.
    """
    own = vocabulary_digest(target) if vocabulary is not None else None
    if own is not None and own != vocabulary:
        made = f"made for {made_for or 'another target'}, whose tokenizer (vocabulary {vocabulary}) is not the one of"
        remedy = "give that target by --model, or make it anew for this one"
        raise CheckpointError(f"{what}: {made} {shown_path(target)} (vocabulary {own}); {remedy}")
