"""Errors that users of several rooms catch."""


class QueueFullError(RuntimeError):
    """A request or an adapter was not taken; it may be later."""
