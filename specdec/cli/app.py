"""The command line."""

from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from specdec import __version__
from specdec.cli.bench import bench
from specdec.cli.chat import chat
from specdec.cli.generate import generate
from specdec.cli.options import Command, Verbose
from specdec.cli.profile import profile
from specdec.cli.program import run_program
from specdec.cli.serve import serve
from specdec.cli.trace import trace
from specdec.cli.vllm_options import ServeCommand

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
for command in (generate, chat, trace, profile):
    app.command(cls=Command)(command)
app.command(cls=ServeCommand)(serve)
app.add_typer(bench, name="bench")


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the console script: exit code 2 and one line on standard error for bad input, 130 after Ctrl-C."""
    run_program(app, args, "specdec")


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


@app.command(cls=Command)
def inspect(
    head: Annotated[
        str,
        typer.Argument(
            metavar="HEAD",
            help="A draft head: its folder, org/name on the Hugging Face hub, or eagle or dspark, the demo's.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
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
