"""The spinner of a starting command: what is being done, on a terminal, gone when it is done."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.status import Status

_LOGGER = logging.getLogger("specdec")


class _SpinnerHandler(logging.Handler):
    """Shows records as the spinner's text, and above it those that are shown without a spinner too.

    Args:
        status: the spinner.
        shown: what showed records before.
        level: from which on.
    """

    def __init__(self, status: Status, shown: Sequence[logging.Handler], level: int) -> None:
        super().__init__()
        self._status, self._shown, self._level = status, shown, level

    def emit(self, record: logging.LogRecord) -> None:
        """Show a record."""
        if record.levelno < self._level:
            self._status.update(escape(record.getMessage()))
            return
        for handler in self._shown:
            self._status.console.print(handler.format(record), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def spinner(text: str, console: Console | None = None) -> Iterator[None]:
    """Show a spinner with the text, then with each log line at info, while the work lasts.

    There is none where standard error is no terminal, or where the lines themselves are shown (`--verbose`).

    Args:
        console: where to show it; None for standard error.
    """
    # FORCE_COLOR makes a file a terminal for colours, but not for what is drawn over.
    console = console or Console(stderr=True, force_terminal=sys.stderr.isatty())
    level = _LOGGER.getEffectiveLevel()
    if not console.is_terminal or level <= logging.INFO:
        yield
        return
    # Two writers to one line would garble it.
    before = [handler for handler in _LOGGER.handlers if type(handler) is logging.StreamHandler]
    with console.status(escape(text)) as status:
        own = _SpinnerHandler(status, before, level)
        for handler in before:
            _LOGGER.removeHandler(handler)
        _LOGGER.addHandler(own)
        _LOGGER.setLevel(logging.INFO)
        try:
            yield
        finally:
            _LOGGER.removeHandler(own)
            _LOGGER.setLevel(level)
            for handler in before:
                _LOGGER.addHandler(handler)
