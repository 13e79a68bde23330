"""`specdec generate`."""

import secrets
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.cli.model_options import OWNERS, SHOWN_DEFAULTS, Chat, Draft, Model, ModelOptions
from specdec.cli.options import Verbose, with_options
from specdec.cli.output_files import check_writable
from specdec.cli.prompts import read_prompts
from specdec.config import AUTO
from specdec.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specdec.cli.render import JsonView, TextView
    from specdec.cli.timed_batch import TimedBatch
    from specdec.cli.trace_file import TraceFile
    from specdec.core.outputs import RequestOutput
    from specdec.llm import LLM

WARM_UP_TOKENS = 8
OUTPUT = "Output"


@with_options(*OWNERS, defaults=SHOWN_DEFAULTS)
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; '-', or none where standard input is piped, to read it there.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSONL file, run as one batch: prompt, messages, conversation or turns (its first) in each line.",
        ),
    ] = None,
    model: Model = None,
    draft: Draft = AUTO,
    chat: Chat = None,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel=OUTPUT, help="One JSON object per prompt and line, nothing else.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", rich_help_panel=OUTPUT, help="Run again without drafts and compare the two.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=OUTPUT,
            help="JSONL file to write: every step of every answer, with its draft tree.",
        ),
    ] = None,
    verbose: Verbose = False,  # noqa: ARG001
    **options: Any,
) -> None:
    """Generate text and report how much the drafts helped.

    \b
    Examples:
      specdec generate "I would like to find a restaurant."
      echo "Book me a train to Cambridge." | specdec generate --temperature 0.8 --seed 1
      specdec generate "I need a taxi." --draft none
      specdec generate "I need a taxi." --compare --json
      specdec generate --prompts prompts.jsonl --max-tokens 64
      specdec generate "I need a taxi." --trace steps.jsonl
      specdec generate --model path/to/llama --draft path/to/head "Hello"
    """
    model_options = ModelOptions.of(model, draft, options)
    if compare and draft == "none":
        raise ValueError("--compare with --draft none has nothing to compare; leave out one of them")
    given = read_prompts(prompt, prompts, raw=chat is False)
    if trace is not None:
        check_writable(trace, "--trace")

    # Late, because torch takes seconds to import, and --help and mistakes should not wait for it.
    from specdec.cli.render import JsonView, TextView
    from specdec.cli.trace_file import TraceFile

    llm = model_options.sharing_a_gpu(1, 1 + compare).load()
    # A head may name its target.
    plain_llm = model_options.without_drafts(llm.config.model).load() if compare else None
    params = model_options.params(llm)
    view = JsonView(given, compare) if as_json else TextView(given, drafting=draft != "none")
    inputs = [one.for_engine(llm, chat, params) for one in given]
    with nullcontext() if trace is None else TraceFile(trace, llm, params) as lines:
        code = _run(llm, plain_llm, inputs, params, view, lines)
    raise typer.Exit(code)


def _run(
    llm: "LLM",
    plain_llm: "LLM | None",
    inputs: list[Any],
    params: SamplingParams,
    view: "JsonView | TextView",
    trace: "TraceFile | None",
) -> int:
    """Run all prompts, and again without drafts if there is a plain engine; return the exit code.

    Args:
        trace: gets the steps of the first run; None if they are not wanted.
    """
    from specdec.cli.timed_batch import measure_in_turns, run_batch

    each = [params] * len(inputs)
    if plain_llm:
        # Both runs must draw the same noise.
        each = [replace(params, seed=secrets.randbits(63) if params.seed is None else params.seed) for _ in inputs]
        few = replace(params, max_tokens=WARM_UP_TOKENS, min_tokens=0)
        for warmed in (llm, plain_llm):
            warmed.generate(inputs[:1], few, use_tqdm=False)

    def listen(number: int, output: "RequestOutput") -> None:
        view.show(output)
        if trace is not None:
            trace.add(number, output)

    batch, plain = run_batch(llm, inputs, each, "generating", listen, trace=trace is not None), None
    if plain_llm and not batch.interrupted:
        batch, plain = measure_in_turns([llm, plain_llm], inputs, each, batch)
    view.end(batch, plain)
    return _exit_code(batch, plain)


def _exit_code(batch: "TimedBatch", plain: "TimedBatch | None") -> int:
    if batch.interrupted or (plain and plain.interrupted):
        return 130
    if errors := [answer.output.error for answer in batch.answers if answer.output.error]:
        typer.echo(f"specdec: {len(errors)} of {len(batch.answers)} failed: {errors[0]}", err=True)
        return 1
    return 0
