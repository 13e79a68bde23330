"""Plug-ins: modules that register head kinds, draft sources and acceptance rules. Every process imports them."""

import importlib
import logging
from collections.abc import Sequence
from importlib.metadata import entry_points

from specdec.kernels.types.settings import one_line

logger = logging.getLogger(__name__)
# Names under which installed packages offer modules.
GROUP = "specdec.plugins"


def import_plugins(names: Sequence[str]) -> None:
    """Import plug-ins, each once in a process. What they register holds for the process.

    Args:
        names: modules, or names that installed packages have in the group `specdec.plugins` of their entry points.

    Raises:
        ValueError: there is no such module, or it cannot be imported; one line.
    """
    for name in names:
        found = {each.name: each.value for each in entry_points(group=GROUP)}
        module = found.get(name, name)
        try:
            importlib.import_module(module)
        except Exception as error:
            raise ValueError(f"plugin {name!r} cannot be imported: {one_line(error)}") from error
        logger.info("plugin %s", name)
