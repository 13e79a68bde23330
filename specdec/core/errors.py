"""Errors that several rooms raise."""

from specdec.kernels.types.settings import ParameterError


class QueueFullError(RuntimeError):
    """A request or an adapter was not taken; it may be later."""


def wrong(name: str, problem: str) -> ParameterError:
    """Return the error of a parameter, whose name begins the message."""
    return ParameterError(name, f"{name} {problem}")
