"""Where the target lies that a head names as its own."""

from pathlib import Path

from transformers.utils import cached_file

from specdec.draft_heads.checkpoint_files import CheckpointError, naming, read_config
from specdec.draft_heads.head_settings import HeadSettings


def verifier_folder(head: Path) -> Path | None:
    """The folder of the target in a speculators head's config.json; None where it names none.

    Raises:
        CheckpointError: no config.json, or a target that is not on this machine.
    """
    settings = read_config(head)
    with naming(head):
        name = HeadSettings.from_json(settings).verifier
        if name is None:
            return None
        folder = local_folder(name, head)
        if folder is None:
            raise CheckpointError(f"its target {name!r} is neither a folder nor in the Hugging Face cache; give one")
    return folder


def local_folder(name: str, beside: Path) -> Path | None:
    """A checkpoint by its path, from here or from `beside`, or by its hub's name in the cache; nothing is fetched."""
    for folder in (Path(name), beside / name):
        if folder.is_dir():
            return folder
    try:
        config = cached_file(name, "config.json", local_files_only=True)
    except (OSError, ValueError):
        return None
    return Path(config).parent if config else None
