"""Files that are replaced as a whole."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from specdec.kernels.types.settings import one_line


def write_whole(file: Path, write: Callable[[Path], Any]) -> None:
    """Replace a file at once by what `write` writes, so that a killed process leaves the old one or the new one.

    Raises:
        OSError: it cannot be written, for example because the disk is full; the old one is left.
    """
    new = file.with_name(f"{file.name}.tmp")
    try:
        write(new)
        new.replace(file)
    except (OSError, SafetensorError) as error:
        raise OSError(f"{file}: cannot be written: {one_line(error)}") from None
    finally:
        new.unlink(missing_ok=True)
