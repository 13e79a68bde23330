"""Checks of a file or a folder that a command writes when its work is done."""

import os
import tempfile
from pathlib import Path


def check_writable(file: Path, option: str) -> None:
    """Check that a file can be written there, before the work begins.

    Raises:
        ValueError: its folder does not exist, there is a folder of that name, or there is no permission.
    """
    if not file.parent.is_dir():
        raise ValueError(f"{option} {file}: {file.parent} is no folder; create it, or name a file elsewhere")
    if file.is_dir():
        raise ValueError(f"{option} {file}: a folder; name a file")
    is_new = not file.exists()
    # To open a pipe and close it again would end its reader.
    if is_new or file.is_file():
        try:
            file.open("ab").close()
        except OSError as error:
            raise ValueError(f"{option} {file}: cannot be written: {error.strerror}; name another file") from None
    if is_new:
        file.unlink()


def check_folder(folder: Path, option: str) -> None:
    """Check that files can be written to a folder, or that it can be made, before the work begins.

    Raises:
        ValueError: there is a file of that name or of a parent's, or there is no permission.
    """
    parent = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    if not parent.is_dir():
        raise ValueError(f"{option} {folder}: {parent} is no folder; name another folder")
    try:
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        raise ValueError(f"{option} {folder}: cannot be written: {error.strerror}; name another folder") from None
