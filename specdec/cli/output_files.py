"""Check of a file that a command writes when its work is done."""

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
