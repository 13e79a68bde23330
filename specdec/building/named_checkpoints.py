"""Checkpoints that belong together: the target of a head, the head that a target names, and heads that are shipped."""

import os
import re
from pathlib import Path
from typing import NamedTuple

from specdec.config import DEMO_HEADS
from specdec.draft_heads.formats.head_kinds import fitting_head
from specdec.draft_heads.formats.head_settings import HeadSettings
from specdec.draft_heads.llama.checkpoint_files import CheckpointError, error_context, read_config
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.gguf.file import GgufFile, is_gguf
from specdec.models.checkpoint import read_settings
from specdec.models.hub import checkpoint_path, shown_name
from specdec.models.model_card import read_card

# In config.json, or in the YAML at the top of the card, README.md.
KEY = "draft_head"
# Heads that the repository ships, beside the package in a clone. Wheels do not have it.
HEADS = Path(__file__).resolve().parents[2] / "heads"
# What repositories and files of the same model in another form have behind its name.
_FORM = re.compile(r"([-._ ]+(gguf|awq|gptq|fp8|int[48]|i1|i?q\d+(_\w+)?|b?f(p)?(16|32)|mxfp4))+$", re.IGNORECASE)


def head_path(name: str | Path) -> Path:
    """Return the folder of a head: by its path, its name on the hub, or the word that the demo's heads have.

    Raises:
        CheckpointError: there is none; see `checkpoint_path`.
    """
    if not isinstance(name, str | Path):
        raise CheckpointError(f"draft is {name!r:.60}; it must be the folder of a head, or its name on the hub")
    if str(name) in DEMO_HEADS and not Path(name).is_dir():
        return DEMO_HEADS[str(name)]
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


class ShippedHead(NamedTuple):
    """A shipped head that fits a target's sizes.

    Attributes:
        folder: the head.
        made_for: name of the target that it was trained for.
        is_named: whether the target has that name.
    """

    folder: Path
    made_for: str
    is_named: bool


def shipped_head(target: Path, sizes: LlamaConfig) -> ShippedHead | None:
    """Return the shipped head for a target, or else one that was made for a target of the same sizes; None if none is.

    A target is known by its name on the hub, that of its folder or file, or those that its settings hold. A folder may
    have any name, and models of one family share their sizes, so that neither is enough.
    """
    names, fitting = {_plain(name) for name in _names(target)}, list[ShippedHead]()
    for file in sorted(HEADS.glob("*/config.json")):
        folder = file.parent
        try:
            fitting_head(folder, sizes)
            made_for = _made_for(folder)
        except CheckpointError:
            continue
        fitting += [ShippedHead(folder, name, _plain(name) in names) for name in made_for]
    return next((head for head in fitting if head.is_named), fitting[0] if fitting else None)


def _made_for(head: Path) -> list[str]:
    """Return the names of the target that a head's config.json and card say."""
    settings = HeadSettings.from_json(read_config(head))
    named = (settings.training.get("target"), settings.verifier, read_card(head).get("base_model"))
    return list(dict.fromkeys(name for name in named if isinstance(name, str) and name))


def _names(target: Path) -> list[str]:
    if is_gguf(target):
        said = GgufFile.open(target).values
        parts = [said.get(f"general.{key}") for key in ("basename", "size_label", "finetune")]
        whole = "-".join(str(part) for part in parts if part)
        return [target.stem, target.resolve().stem, str(said.get("general.name", "")), whole]
    return [shown_name(target), str(read_settings(target).get("_name_or_path") or "")]


def _plain(name: str) -> str:
    """Return a name without its organisation, the form of its weights, case and punctuation."""
    return re.sub(r"[^a-z0-9]", "", _FORM.sub("", name.rpartition("/")[2]).lower())
