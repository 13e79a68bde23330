"""`specdec bench`."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.bench.bench_settings import BenchSettings, LatencySettings, ThroughputSettings
from specdec.bench.mode import parse_modes
from specdec.bench.peers import parse_peers
from specdec.bench.prompt_file import GivenPrompt, read_prompt_file
from specdec.cli.model_options import OWNERS, SHAPE_DEFAULTS, Chat, Model, check_engine, engine_options
from specdec.cli.options import Command, Verbose, options_for, with_options
from specdec.cli.output_files import check_writable
from specdec.core.sampling_params import SamplingParams
from specdec.draft_heads.drafting.draft_shape import DraftShape

if TYPE_CHECKING:
    from specdec.bench.comparison import Kind

DEMO_PROMPTS = Path(__file__).parents[1] / "bench" / "prompts" / "demo.jsonl"
OWN_DEFAULTS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 64, "seed": 0}
SHOWN_DEFAULTS = {
    **SHAPE_DEFAULTS,
    **{name: f"{value:g}" for name, value in OWN_DEFAULTS.items()},
    "enable_prefix_caching": "off, so that rounds do not profit from each other",
}

bench = typer.Typer(rich_markup_mode=None)
AsJson = Annotated[
    bool, typer.Option("--json", rich_help_panel="Output", help="One JSON object on standard output, no tables.")
]


@bench.callback(invoke_without_command=True)
def overview(context: typer.Context) -> None:
    """Measure plain decoding, drafts and other engines in one interleaved run.

    \b
    Examples:
      specdec bench latency
      specdec bench throughput --request-rate 8
      specdec bench acceptance --draft eagle --draft ngram
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@bench.command(cls=Command)
@with_options(LatencySettings, *OWNERS, defaults=SHOWN_DEFAULTS)
def latency(
    model: Model = None,
    chat: Chat = None,
    as_json: AsJson = False,
    verbose: Verbose = False,  # noqa: ARG001
    **options: Any,
) -> None:
    """Measure prompts one at a time: speed-up, tau, cost of a step, time to first token, time per token.

    \b
    Examples:
      specdec bench latency
      specdec bench latency --draft eagle --draft eagle:nodes=16 --draft ngram --output results.json
      specdec bench latency --peer transformers --peer transformers:ngram
      specdec bench latency --model path/to/llama --draft path/to/head --dataset question.jsonl
    """
    _run("latency", LatencySettings(**options_for(LatencySettings, options)), model, chat, as_json, options)


@bench.command(cls=Command)
@with_options(ThroughputSettings, *OWNERS, defaults=SHOWN_DEFAULTS)
def throughput(
    model: Model = None,
    chat: Chat = None,
    as_json: AsJson = False,
    verbose: Verbose = False,  # noqa: ARG001
    **options: Any,
) -> None:
    """Measure all prompts together, at once or arriving at a rate.

    \b
    Examples:
      specdec bench throughput
      specdec bench throughput --max-num-seqs 8 --draft eagle --draft ngram
      specdec bench throughput --dataset prompts.jsonl --request-rate 8
    """
    _run("throughput", ThroughputSettings(**options_for(ThroughputSettings, options)), model, chat, as_json, options)


@bench.command(cls=Command)
@with_options(BenchSettings, *OWNERS, defaults={**SHOWN_DEFAULTS, "adaptive_drafts": "fixed", "max_num_seqs": "32"})
def acceptance(
    model: Model = None,
    chat: Chat = None,
    as_json: AsJson = False,
    verbose: Verbose = False,  # noqa: ARG001
    **options: Any,
) -> None:
    """Count accepted draft tokens: tau and acceptance per depth, with whole trees in every step.

    \b
    Examples:
      specdec bench acceptance
      specdec bench acceptance --draft eagle:depth=6,branching=10,nodes=60 --draft ngram
      specdec bench acceptance --temperature 1 --dataset question.jsonl
    """
    _run("acceptance", BenchSettings(**options_for(BenchSettings, options)), model, chat, as_json, options)


def _run(
    kind: "Kind", given: BenchSettings, model: str | None, chat: bool | None, as_json: bool, options: dict[str, Any]
) -> None:
    timed = given if isinstance(given, LatencySettings) else LatencySettings(rounds=1, warmup_rounds=0)
    default = os.environ.get("SPECDEC_DRAFT") or ("none" if model else "eagle")
    modes = parse_modes(given.draft or ([] if default == "none" else [default]))
    shape = options_for(DraftShape, options)
    settings = engine_options(options)
    params = SamplingParams(**{**OWN_DEFAULTS, **options_for(SamplingParams, options)})
    for mode in modes:
        check_engine({**shape, **mode.shape}, {**settings, **mode.settings})
    peers, rate = parse_peers(timed.peer), getattr(timed, "request_rate", None)
    if peers and params.temperature:
        raise ValueError(f"temperature is {params.temperature:g}; it must be 0 with --peer; leave out one of them")

    if peers and rate:
        raise ValueError("--request-rate and --peer exclude each other; leave one out")
    if given.output:
        check_writable(given.output, "--output")
    prompts = _prompts(given, raw=chat is False)

    # Late, because torch takes seconds to import, and --help and mistakes should not wait for it.
    from specdec.bench.comparison import Comparison, compare
    from specdec.bench.report import show, to_json
    from specdec.core.progress import progress_bar

    comparison = Comparison(
        kind=kind,
        dataset=given.dataset,
        prompts=prompts,
        modes=modes,
        peers=peers,
        params=params,
        model=model,
        shape=shape,
        settings=settings,
        chat=chat,
        rounds=timed.rounds,
        warmup=timed.warmup_rounds,
        request_rate=rate,
    )
    with progress_bar(comparison.num_runs, "measuring") as advance:
        results = compare(comparison, advance)
    document = to_json(results)
    try:
        # The file first: a reader of the tables may close the pipe early.
        if given.output:
            given.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--output {given.output}: cannot be written: {error.strerror}") from None
    finally:
        if as_json:
            typer.echo(json.dumps(document))
        else:
            show(results)


def _prompts(given: BenchSettings, raw: bool) -> list[GivenPrompt]:
    """Return the prompts of the dataset, at most `num_prompts` of each category."""
    file = DEMO_PROMPTS if given.dataset == "demo" else Path(given.dataset)
    counts: Counter[str] = Counter()
    chosen = []
    for prompt in read_prompt_file(file, raw, "--dataset", ("demo",), is_dataset=True):
        counts[prompt.category] += 1
        if given.num_prompts is None or counts[prompt.category] <= given.num_prompts:
            chosen.append(prompt)
    return chosen
