"""The name by which others know a target."""

import re
from pathlib import Path

from specdec.config import DEMO

# A folder in the cache of the Hugging Face hub.
_CACHED = re.compile(r"models--([^/]+?)--([^/]+)")
_HUB = re.compile(r"[\w.-]+/[\w.-]+")


def target_name(model: Path) -> str:
    """Return a target's name on the hub if its path shows it, else the name of its folder; never a path."""
    if model == DEMO / "target":
        return "specdec/demo/target"
    for path in (model, model.resolve()):
        for part in path.parts:
            if found := _CACHED.fullmatch(part):
                return f"{found[1]}/{found[2]}"
    if not model.exists() and _HUB.fullmatch(str(model)):
        return str(model)
    return model.resolve().name
