"""`specdec trace`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from specdec.cli.model_options import OWNERS, SHOWN_DEFAULTS, Chat, Draft, Model, ModelOptions
from specdec.cli.options import Verbose, with_options
from specdec.cli.output_files import check_writable
from specdec.cli.prompts import read_prompts
from specdec.config import AUTO, DEMO


@with_options(*OWNERS, defaults=SHOWN_DEFAULTS)
def trace(
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The prompt; '-' or none: standard input.", show_default=False)
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", rich_help_panel="Output", help="HTML file to write.")
    ] = Path("trace.html"),
    model: Model = None,
    draft: Draft = AUTO,
    chat: Chat = None,
    verbose: Verbose = False,  # noqa: ARG001
    **options: Any,
) -> None:
    """Answer a prompt and write all draft trees as one HTML file, to be opened in a browser.

    The file needs no server and no other file. --fixed-drafts gives every step a tree.

    \b
    Examples:
      specdec trace --prompt "I need a taxi." -o trace.html
      specdec trace --prompt "I need a taxi." --temperature 0.8 --seed 1 --fixed-drafts
      specdec trace --model path/to/llama --draft path/to/head --prompt "Hello"
    """
    model_options = ModelOptions.of(model, draft, options)
    (given,) = read_prompts(prompt, None, raw=chat is False)
    check_writable(output, "--output")

    # Late, because torch takes seconds to import, and --help and mistakes should not wait for it.
    from specdec.cli.render import summary
    from specdec.cli.timed_batch import run_batch
    from specdec.core.step_report import StepReporter
    from specdec.models.hub import shown_name
    from specdec.server.viewer import recorded_page

    llm = model_options.load()
    params = model_options.params(llm)
    batch = run_batch(llm, [given.for_engine(llm, chat, params)], [params], "answering", trace=True)
    answer, cut = batch.answers[0].output, batch.answers[0].cut
    if answer.error is not None:
        raise ValueError(answer.error)
    reporter = StepReporter(llm.tokenizer.backend if llm.tokenizer else None, params)
    # The file may be passed on, so it does not name the folders of this machine.
    name = "demo" if llm.config.model == DEMO / "target" else shown_name(llm.config.model)
    page = recorded_page(name, given.text, reporter.new_steps(answer), cut)
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        typer.echo(f"{answer.text}\n\n{summary(batch)}")
        raise ValueError(f"--output {output}: cannot be written: {error.strerror}") from None
    typer.echo(f"{summary(batch)}\n{output}")
    raise typer.Exit(130 if batch.interrupted else 0)
