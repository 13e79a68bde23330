"""End of a command: its exit code, and one line on standard error for bad input."""

import io
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

import typer

from specdec.core.out_of_memory import REMEDY, memory_shortage

# Which click typer stands on depends on its version; its errors are reached through one that typer exports.
_UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]
INTERRUPTED = 130
# Loggers of other packages whose warnings are a part of the log. Without a handler, Python would write them bare.
_OTHERS = ("asyncio", "uvicorn")
# Also what other programs take for the end of a line, or for a change of direction.
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def run_program(app: typer.Typer, args: Sequence[str] | None, name: str, prog_name: str | None = None) -> NoReturn:
    """Run a command line: exit code 2 and one line on standard error for bad input, 130 after Ctrl-C.

    Args:
        args: None for those of the process.
        name: stands before the line on standard error.
        prog_name: how the program is called in its help; None for `name`.
    """
    _replace_what_output_lacks()
    with _noted_interrupts() as interrupts:
        try:
            with _logging_to_stderr(name):
                code = app(args=args, prog_name=prog_name or name, standalone_mode=False)
        except (typer.Abort, KeyboardInterrupt):
            code = INTERRUPTED
        except Exception as error:
            # An import or a library that Ctrl-C cuts short may raise an error of its own.
            code = INTERRUPTED if interrupts else _complain(name, error)
    sys.exit(code or 0)


def _replace_what_output_lacks() -> None:
    """Let standard output show a replacement for characters that its encoding lacks, as standard error does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _complain(name: str, error: Exception) -> int:
    shortage = memory_shortage(error)
    if shortage is None and not isinstance(error, _UsageError | ValueError | OSError):
        raise error
    if shortage is not None:
        error = ValueError(f"{shortage}; {REMEDY}")
    message = error.format_message() if isinstance(error, _UsageError) else str(error)
    line = " ".join(part.strip() for part in message.splitlines()).replace(": Value error, ", ": ")
    # Arguments may hold bytes that are no UTF-8.
    print(f"{name}:", line.encode(errors="backslashreplace").decode(), file=sys.stderr)
    return 2


@contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """Note each Ctrl-C, and raise KeyboardInterrupt as usual."""
    seen: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield seen
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _LogFormatter(logging.Formatter):
    """Records that cannot pass for several, whatever text of a client they hold.

    Further lines of a message are indented, and other control characters are shown as escapes.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _CONTROLS.sub(_shown, super().formatMessage(record))


def _shown(control: re.Match[str]) -> str:
    return "\n    " if control[0] == "\n" else control[0].encode("unicode_escape").decode()


@contextmanager
def _logging_to_stderr(name: str) -> Iterator[None]:
    """Show warnings, or what SPECDEC_LOG_LEVEL or --verbose asks for."""
    logger, handler = logging.getLogger("specdec"), logging.StreamHandler()
    level = os.environ.get("SPECDEC_LOG_LEVEL", "warning").upper()
    if level not in logging.getLevelNamesMapping():
        raise ValueError(f"SPECDEC_LOG_LEVEL is {level!r}; it must be one of debug, info, warning, error, critical")
    handler.setFormatter(_LogFormatter(f"{name}: %(levelname)s: %(message)s"))
    before = logger.level
    loggers = (logger, *map(logging.getLogger, _OTHERS))
    for each in loggers:
        each.addHandler(handler)
    logger.setLevel(level)
    # What was chosen or fetched for the user is shown too.
    told = [logging.getLogger(f"specdec.{module}") for module in ("building.resolved_config", "models.packaged")]
    for each in told:
        each.setLevel("INFO" if level == "WARNING" else "NOTSET")
    try:
        yield
    finally:
        for each in loggers:
            each.removeHandler(handler)
        logger.setLevel(before)
        for each in told:
            each.setLevel("NOTSET")
