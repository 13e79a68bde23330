"""The heads that the repository ships under `heads/`, and which of them is for a target."""

import re
from pathlib import Path
from typing import NamedTuple

from specdec.draft_heads.formats.head_kinds import fitting_head
from specdec.draft_heads.formats.head_settings import HeadSettings
from specdec.draft_heads.llama.checkpoint_files import CheckpointError, read_config
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.gguf.file import GgufFile, is_gguf
from specdec.models.checkpoint import read_settings
from specdec.models.hub import shown_name
from specdec.models.model_card import read_card

# Beside the package in a clone. Wheels do not have it.
HEADS = Path(__file__).resolve().parents[2] / "heads"
# What repositories and files of the same model in another form have behind its name.
_FORM = re.compile(r"([-._ ]+(gguf|awq|gptq|fp8|int[48]|i1|i?q\d+(_\w+)?|b?f(p)?(16|32)|mxfp4))+$", re.IGNORECASE)


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
