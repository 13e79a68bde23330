"""Check of a file that a command writes when its work is done."""

from pathlib import Path


def check_writable(file: Path, option: str) -> None:
    """Check that a file can be written there, before the work begins.

    Raises:
        ValueError: its folder does not exist, or there is a folder of that name.
    """
    if not file.parent.is_dir():
        raise ValueError(f"{option} {file}: {file.parent} is no folder; create it, or name a file elsewhere")
    if file.is_dir():
        raise ValueError(f"{option} {file}: a folder; name a file")
