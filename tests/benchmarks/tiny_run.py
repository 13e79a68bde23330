"""One tiny run of `benchmarks.gpu`."""

from typing import Any, NamedTuple


class TinyRun(NamedTuple):
    """Lines that the run printed, and the document in the last one."""

    lines: list[str]
    document: dict[str, Any]
