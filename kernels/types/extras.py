"""Packages of the extras, which may be missing. Pure Python."""

from collections.abc import Mapping
from importlib.util import find_spec


def lacking(user: str, extra: str, packages: Mapping[str, str]) -> str | None:
    """Return the message that packages are missing, with the remedy; None if they are there.

    Args:
        user: what needs them, as the message begins.
        extra: of specdec, which installs them.
        packages: their names by those of their modules.
    """
    missing = [package for module, package in packages.items() if not _is_there(module)]
    return f"{user} needs {', '.join(missing)}; run: pip install 'specdec[{extra}]'" if missing else None


def _is_there(module: str) -> bool:
    # A module within a package that is missing may not be asked for.
    package, dot, _ = module.rpartition(".")
    return (not dot or _is_there(package)) and find_spec(module) is not None
