"""Errors of an engine process."""

CLOSED = "the engine is closed; make a new AsyncLLM"


class EngineDeadError(RuntimeError):
    """The engine process is not there: it died, is being restarted, or was closed.

    Attributes:
        restarting: whether another attempt may succeed soon. A server answers 503.
    """

    def __init__(self, message: str, *, restarting: bool = False) -> None:
        super().__init__(message)
        self.restarting = restarting

    def fresh(self) -> "EngineDeadError":
        """Return the same error to be raised once more: each raise would lengthen the traceback of one object."""
        return EngineDeadError(str(self), restarting=self.restarting)
