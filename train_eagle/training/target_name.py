"""The name by which others know a target."""

from pathlib import Path

from specdec.config import DEMO
from specdec.models.hub import HUB_NAME, shown_name


def target_name(model: Path) -> str:
    """Return a target's name on the hub, or the name of its folder; never a path."""
    if model == DEMO / "target":
        return "specdec/demo/target"
    if not model.exists() and HUB_NAME.fullmatch(str(model)):
        return str(model)
    return shown_name(model)
