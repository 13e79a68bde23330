"""Whether a request may wait."""

from enum import Enum


class Admission(Enum):
    """Whether a request can be queued."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class QueueFullError(RuntimeError):
    """As many requests wait as may; try again later."""
