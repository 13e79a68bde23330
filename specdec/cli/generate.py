"""`specdec generate`."""

import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.cli.options import Verbose, options_for, with_options
from specdec.cli.prompts import read_prompts
from specdec.config import DEMO, EngineConfig, default_shape, engine_config
from specdec.core.sampling_params import SamplingParams
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.scheduling.scheduler_config import SchedulerConfig

if TYPE_CHECKING:
    from specdec.cli.render import JsonView, TextView
    from specdec.cli.timed_batch import TimedBatch
    from specdec.llm import LLM

WARM_UP_TOKENS = 8
# Where neither an option nor the model's generation_config.json says otherwise.
OWN_DEFAULTS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 256}
SHOWN_DEFAULTS = {
    **dict.fromkeys(("depth", "branching", "nodes", "min_reach"), "by device"),
    **{name: "the model's, else " + value for name, value in {"top_p": "1", "min_p": "0", "top_k": "0"}.items()},
    **{name: f"the model's, else {value:g}" for name, value in OWN_DEFAULTS.items()},
    "repetition_penalty": "the model's, else 1",
}


@with_options(SamplingParams, DraftShape, EngineConfig, SchedulerConfig, defaults=SHOWN_DEFAULTS)
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; '-', or none where standard input is piped, to read it there.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSONL file, run as one batch: prompt, messages, conversation or turns (its first) in each line."
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(envvar="SPECDEC_MODEL", help="Checkpoint folder of the target; default: demo model.")
    ] = None,
    draft: Annotated[
        str,
        typer.Option(
            envvar="SPECDEC_DRAFT",
            show_default=False,
            help="eagle (the demo's head), ngram, none, or the folder of a head or small model; default: eagle.",
        ),
    ] = "eagle",
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Use the chat template, or the prompt as it is; default: chat if it can."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per prompt and line, nothing else.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Run again without drafts and compare the two.")] = False,
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
      specdec generate --model path/to/llama --draft path/to/head "Hello"
    """
    sampling, shape = options_for(SamplingParams, options), options_for(DraftShape, options)
    settings = {**options_for(EngineConfig, options), **options_for(SchedulerConfig, options)}
    # Report mistakes before importing torch. The model may allow more tokens than the command does by itself.
    SamplingParams(**{**OWN_DEFAULTS, "max_tokens": None, **sampling})
    replace(default_shape("cpu"), **shape)
    engine_config(DEMO, None, settings)
    if compare and draft == "none":
        raise ValueError("--compare with --draft none has nothing to compare; leave out one of them")
    given = read_prompts(prompt, prompts, raw=chat is False)

    # Late, because torch takes seconds to import, and --help and mistakes should not wait for it.
    from specdec.cli.render import JsonView, TextView
    from specdec.core.device import resolve_device
    from specdec.llm import LLM

    settings["shape"] = replace(default_shape(resolve_device(settings.get("device", "auto")).type), **shape)
    llm = LLM(model, draft, **settings)
    # A head may name its target.
    plain_llm = LLM(llm.config.model, None, **settings) if compare else None
    params = SamplingParams(**{**OWN_DEFAULTS, **llm.generation_config.params, **sampling})
    view = JsonView(given, compare) if as_json else TextView(given, drafting=draft != "none")
    inputs = [one.for_engine(llm, chat) for one in given]
    code = _run(llm, plain_llm, inputs, params, view)
    raise typer.Exit(code)


def _run(
    llm: "LLM", plain_llm: "LLM | None", inputs: list[Any], params: SamplingParams, view: "JsonView | TextView"
) -> int:
    """Run all prompts, and again without drafts if there is a plain engine; return the exit code."""
    from specdec.cli.timed_batch import run_batch

    each = [params] * len(inputs)
    if plain_llm:
        # Both runs must draw the same noise.
        each = [replace(params, seed=secrets.randbits(63) if params.seed is None else params.seed) for _ in inputs]
        few = replace(params, max_tokens=WARM_UP_TOKENS, min_tokens=0)
        for warmed in (llm, plain_llm):
            warmed.generate(inputs[:1], few, use_tqdm=False)
    batch, plain = run_batch(llm, inputs, each, "generating", view.show), None
    if plain_llm and not batch.interrupted:
        plain = run_batch(plain_llm, inputs, each, "without drafts")
    view.end(batch, plain)
    return _exit_code(batch, plain)


def _exit_code(batch: "TimedBatch", plain: "TimedBatch | None") -> int:
    if batch.interrupted or (plain and plain.interrupted):
        return 130
    if errors := [answer.output.error for answer in batch.answers if answer.output.error]:
        typer.echo(f"specdec: {len(errors)} of {len(batch.answers)} failed: {errors[0]}", err=True)
        return 1
    return 0
