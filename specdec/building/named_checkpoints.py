"""Checkpoints that name each other: the target of a head, and the head of a target."""

import os
from pathlib import Path

from specdec.config import DEMO_HEADS
from specdec.draft_heads.formats.head_settings import HeadSettings
from specdec.draft_heads.llama.checkpoint_files import CheckpointError, error_context, read_config
from specdec.gguf.file import is_gguf
from specdec.models.hub import checkpoint_path
from specdec.models.model_card import read_card

# In config.json, or in the YAML at the top of the card, README.md.
KEY = "draft_head"


def head_path(name: str) -> Path:
    """Return the folder of a head: by its path, its name on the hub, or the word that the demo's heads have.

    Raises:
        CheckpointError: there is none; see `checkpoint_path`.
    """
    if name in DEMO_HEADS and not Path(name).is_dir():
        return DEMO_HEADS[name]
    return checkpoint_path(name, known=DEMO_HEADS)


def named_target(head: Path) -> Path | None:
    """Return the target that a speculators head's config.json names; None if it names none.

    Raises:
        CheckpointError: a folder without config.json, or a target that is neither here nor to be had from the hub.
    """
    if is_gguf(head):
        return None
    settings = read_config(head)
    with error_context(head):
        return _found("target", HeadSettings.from_json(settings).verifier, head)


def named_head(target: Path) -> Path | None:
    """Return the head that a target's config.json or card names as `draft_head`; None if they name none.

    Raises:
        CheckpointError: a folder without config.json, or a head that is neither here nor to be had from the hub.
    """
    if is_gguf(target):
        return None
    with error_context(target):
        return _found("head", read_config(target).get(KEY) or read_card(target).get(KEY), target)


def _found(what: str, name: object, folder: Path) -> Path | None:
    """Return the checkpoint that a folder names as its head or target.

    Args:
        name: a name on the hub or a path, from here or from the folder; None if it names none.
    """
    if not name:
        return None
    if not isinstance(name, str):
        raise CheckpointError(f"its {what} {name!r:.100} must be a path, or org/name on the hub")
    try:
        found = checkpoint_path(name, beside=folder)
    except CheckpointError as error:
        raise CheckpointError(f"its {what} {error}") from None
    return Path(os.path.normpath(found))
