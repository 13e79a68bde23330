"""Errors of calls of replicas, in words."""

from specdec.core.commands import one_line


def reason_of(error: BaseException) -> str:
    """Return an error in one line; Ray's errors name the one that was raised in the replica as their cause."""
    cause = getattr(error, "cause", None)
    return one_line(cause if isinstance(cause, BaseException) else error).rstrip(".")
