"""The command line."""

import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, NoReturn

import typer

from specdec import __version__
from specdec.cli.bench import bench
from specdec.cli.chat import chat
from specdec.cli.generate import generate
from specdec.cli.options import Verbose
from specdec.cli.serve import serve
from specdec.cli.trace import trace

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(generate)
app.command()(chat)
app.command()(trace)
app.command()(serve)
app.add_typer(bench, name="bench")
# Which click typer stands on depends on its version; its errors are reached through one that typer exports.
_UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]
INTERRUPTED = 130


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the console script: exit code 2 and one line on standard error for bad input, 130 after Ctrl-C."""
    with _noted_interrupts() as interrupts:
        try:
            with _logging_to_stderr():
                code = app(args=args, prog_name="specdec", standalone_mode=False)
        except (typer.Abort, KeyboardInterrupt):
            code = INTERRUPTED
        except Exception as error:
            # An import or a library that Ctrl-C cuts short may raise an error of its own.
            code = INTERRUPTED if interrupts else _complain(error)
    sys.exit(code or 0)


def _complain(error: Exception) -> int:
    if not isinstance(error, _UsageError | ValueError | OSError):
        raise error
    message = error.format_message() if isinstance(error, _UsageError) else str(error)
    line = " ".join(part.strip() for part in message.splitlines())
    # Arguments may hold bytes that are no UTF-8.
    print("specdec:", line.encode(errors="backslashreplace").decode(), file=sys.stderr)
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


@contextmanager
def _logging_to_stderr() -> Iterator[None]:
    """Show warnings, or what SPECDEC_LOG_LEVEL or --verbose asks for."""
    logger, handler = logging.getLogger("specdec"), logging.StreamHandler()
    level = os.environ.get("SPECDEC_LOG_LEVEL", "warning").upper()
    if level not in logging.getLevelNamesMapping():
        raise ValueError(f"SPECDEC_LOG_LEVEL is {level!r}; it must be one of debug, info, warning, error, critical")
    handler.setFormatter(logging.Formatter("specdec: %(levelname)s: %(message)s"))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    # What was chosen for the user is shown too.
    choices = logging.getLogger("specdec.engine.resolved_config")
    choices.setLevel("INFO" if level == "WARNING" else "NOTSET")
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        choices.setLevel("NOTSET")


@app.callback(invoke_without_command=True)
def specdec(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """An inference engine for Llama-family models in which speculation is the normal case."""
    if version:
        typer.echo(f"specdec {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def inspect(
    head: Annotated[
        str, typer.Argument(metavar="HEAD", help="A draft head: its folder, or org/name on the Hugging Face hub.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            envvar="SPECDEC_MODEL",
            help="Its target, likewise; default: the one it names, if that is here or on the hub.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, nothing else.")] = False,
    verbose: Verbose = False,  # noqa: ARG001
) -> None:
    """Describe a draft head: its kind, the target layers it reads, its sizes, and the assumptions about it.

    \b
    Examples:
      specdec inspect path/to/head
      specdec inspect path/to/head --model path/to/llama
      specdec inspect path/to/head --json
    """
    # Late, because torch takes seconds to import.
    from specdec.cli.inspection import Inspection, show

    show(Inspection.of(head, model), as_json)
