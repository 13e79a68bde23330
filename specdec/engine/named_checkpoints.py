"""Checkpoints that name each other: the target of a head, and the head of a target."""

import logging
import os
import re
from pathlib import Path

import yaml

from specdec.draft_heads.formats.head_settings import HeadSettings
from specdec.draft_heads.llama.checkpoint_files import CheckpointError, error_context, first_line, read_config
from specdec.models.gguf_file import is_gguf
from specdec.models.hub import checkpoint_path

logger = logging.getLogger(__name__)
# In config.json, or in the YAML at the top of the card, README.md.
KEY = "draft_head"
_TOP = re.compile(r"---\s*\n(.*?\n)---\s*\n", re.DOTALL)


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
        return _found("head", read_config(target).get(KEY) or _card(target).get(KEY), target)


def _card(folder: Path) -> dict[str, object]:
    """Return the settings at the top of the card; none if there is no card, or none that can be read."""
    file = folder / "README.md"
    try:
        top = _TOP.match(file.read_text(encoding="utf-8")) if file.is_file() else None
        values = yaml.safe_load(top[1]) if top else None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        logger.info("%s: its settings are left out, since they cannot be read: %s", file, first_line(error))
        return {}
    return values if isinstance(values, dict) else {}


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
    if not found.exists():
        raise CheckpointError(f"its {what} {name!r} is neither a folder nor a name on the hub; give one")
    return Path(os.path.normpath(found))
