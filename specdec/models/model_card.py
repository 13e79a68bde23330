"""The settings at the top of a model card, README.md."""

import logging
import re
from pathlib import Path

import yaml

from specdec.kernels.types.settings import one_line

logger = logging.getLogger(__name__)
_TOP = re.compile(r"---\s*\n(.*?\n)---\s*\n", re.DOTALL)


def read_card(folder: Path) -> dict[str, object]:
    """Return the settings at the top of the card; none if there is no card, or none that can be read."""
    file = folder / "README.md"
    try:
        top = _TOP.match(file.read_text(encoding="utf-8")) if file.is_file() else None
        values = yaml.safe_load(top[1]) if top else None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        logger.info("%s: its settings are left out, since they cannot be read: %s", file, one_line(error))
        return {}
    return values if isinstance(values, dict) else {}
