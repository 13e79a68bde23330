"""Files that are there whole or not at all, whenever the process that writes them is killed."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def write_whole(file: Path, write: Callable[[Path], Any]) -> None:
    """Have `write` write another file, and put it in the place of `file`."""
    new = file.with_name(f"{file.name}.tmp")
    write(new)
    new.replace(file)


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """A JSON object."""
    write_whole(file, lambda new: new.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8"))
