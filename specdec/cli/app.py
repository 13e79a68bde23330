"""The command line."""

import secrets
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from specdec import __version__
from specdec.cli.prompts import read_prompts
from specdec.core.sampling_params import SamplingParams

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
# Which click typer stands on depends on its version; its errors are reached through one that typer exports.
_UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]
WARM_UP_TOKENS = 8
# Where neither an option nor the model's generation_config.json says otherwise.
OWN_DEFAULTS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 256}


def main(args: Sequence[str] | None = None) -> NoReturn:
    """The console script: exit code 2 and one line on standard error for bad input, 130 after Ctrl-C."""
    try:
        code = app(args=args, prog_name="specdec", standalone_mode=False)
    except _UsageError as error:
        code = _complain(error.format_message())
    except (ValueError, OSError) as error:
        code = _complain(str(error))
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    sys.exit(code or 0)


def _complain(message: str) -> int:
    print("specdec:", " ".join(line.strip() for line in message.splitlines()), file=sys.stderr)
    return 2


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
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; '-', or none where standard input is piped, to read it there.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSONL file, run as one batch: prompt, messages or turns (its first) in each line."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(envvar="SPECDEC_MODEL", help="Checkpoint folder of the target; default: demo model.")
    ] = None,
    draft: Annotated[
        str,
        typer.Option(
            envvar="SPECDEC_DRAFT", help="eagle (the demo's head), ngram, none, or the folder of a head or small model."
        ),
    ] = "eagle",
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Use the chat template, or the prompt as it is; default: chat if it can."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens to generate per prompt; default: the model's, else 256.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 for greedy decoding, higher for more variety; default: the model's, else 0.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Probability mass to sample from, above 0 and at most 1.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Likeliest tokens to sample from; 0 or -1 for all.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Least probability sampled, as a share of the likeliest token's.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1, tokens of prompt and output become less likely.")
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="Above 0, tokens of the output become less likely.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="The same, the more the more often they occur.")
    ] = None,
    min_tokens: Annotated[int | None, typer.Option(help="Tokens before which nothing ends the output.")] = None,
    bad_word: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Never generate this; repeatable.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling; default: drawn anew.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End the text before this; repeatable.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end token.")] = False,
    verify: Annotated[
        str, typer.Option(help="Acceptance rule: coupled, rejection, or block (with drafts in one chain).")
    ] = "coupled",
    depth: Annotated[
        int | None, typer.Option(help="Most draft tokens in a row; default, as for the next three: by device.")
    ] = None,
    branching: Annotated[int | None, typer.Option(help="Draft nodes expanded per depth.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Draft nodes verified per step.")] = None,
    min_reach: Annotated[
        float | None, typer.Option(help="Draft deeper while the chance to get there is this; 0: always.")
    ] = None,
    draft_vocab: Annotated[
        str | None, typer.Option(metavar="N|FILE", help="Tokens that can be drafted: how many, or a file of their ids.")
    ] = None,
    draft_rank: Annotated[
        int | None, typer.Option(help="Score all tokens by so many numbers each, and the best of them exactly.")
    ] = None,
    adaptive_drafts: Annotated[
        bool,
        typer.Option("--adaptive-drafts/--fixed-drafts", help="Trees as large as they repay, or as large as allowed."),
    ] = True,
    max_num_seqs: Annotated[int | None, typer.Option(help="Most prompts running at once.")] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Most tokens in a step, drafts included; longer prompts are split.")
    ] = None,
    kv_cache_memory: Annotated[
        int | None, typer.Option(help="Bytes for the cache; default: 1 GiB on a CPU, what is left on a GPU.")
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Share of a GPU's memory for weights, steps and cache together.")
    ] = None,
    swap_space: Annotated[
        float | None, typer.Option(metavar="GIB", help="Host memory for what is preempted; 0: compute it again.")
    ] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens a cache block, a multiple of 8.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float64, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    kernels: Annotated[
        str | None, typer.Option(help="auto, torch, or triton: Triton's on a GPU, plain torch elsewhere.")
    ] = None,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="Capture no CUDA graphs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per prompt and line, nothing else.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Run again without drafts and compare the two.")] = False,
) -> None:
    """Generate text, and tell how much the drafts helped.

    \b
    Examples:
      specdec generate "I would like to find a restaurant."
      echo "Book me a train to Cambridge." | specdec generate --temperature 0.8 --seed 1
      specdec generate "I need a taxi." --draft none
      specdec generate "I need a taxi." --compare --json
      specdec generate --prompts prompts.jsonl --max-tokens 64
      specdec generate --model path/to/llama --draft path/to/head "Hello"
    """
    options = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "min_tokens": min_tokens,
        "bad_words": bad_word,
        "seed": seed,
        "max_tokens": max_tokens,
        "stop": stop,
        "ignore_eos": ignore_eos,
    }
    chosen = {name: value for name, value in options.items() if value is not None}
    # The model may allow more tokens than the command does by itself.
    SamplingParams(**{**OWN_DEFAULTS, "max_tokens": None, **chosen})
    if compare and draft == "none":
        raise ValueError("--compare with --draft none has nothing to compare; leave out one of them")
    given = read_prompts(prompt, prompts, raw=chat is False)

    # Late, because torch takes seconds to import, and --help and mistakes should not wait for it.
    from specdec.cli.render import JsonView, TextView, progress_bar
    from specdec.cli.timed_batch import run_batch
    from specdec.config import default_shape, resolve_device
    from specdec.llm import LLM

    asked: dict[str, Any] = {"depth": depth, "branching": branching, "nodes": nodes, "min_reach": min_reach}
    shape = replace(default_shape(resolve_device(device)), **{k: v for k, v in asked.items() if v is not None})
    sizes: dict[str, Any] = {
        "adaptive_drafts": adaptive_drafts,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "kv_cache_memory": kv_cache_memory,
        "gpu_memory_utilization": gpu_memory_utilization,
        "swap_space": swap_space,
        "block_size": block_size,
        "kernels": kernels,
        "draft_vocab": draft_vocab,
        "draft_rank": draft_rank,
        "enforce_eager": enforce_eager,
    }
    given_sizes = {name: value for name, value in sizes.items() if value is not None}

    def load(target: Path | None, head: str | None) -> LLM:
        return LLM(target, head, dtype=dtype, device=device, shape=shape, verify=verify, **given_sizes)

    llm = load(model, draft)
    # A head may name its target.
    plain_llm = load(llm.config.model, None) if compare else None
    params = SamplingParams(**{**OWN_DEFAULTS, **llm.generation_config.params, **chosen})
    inputs = [one.for_engine(llm, chat) for one in given]
    each = [params] * len(given)
    if plain_llm:
        # Both runs must draw the same noise.
        each = [replace(params, seed=secrets.randbits(63) if seed is None else seed) for _ in given]
        few = replace(params, max_tokens=WARM_UP_TOKENS, min_tokens=0)
        for warmed in (llm, plain_llm):
            warmed.generate(inputs[:1], few, use_tqdm=False)

    view = JsonView(given, compare) if as_json else TextView(given, drafting=draft != "none")
    with progress_bar(len(given), "generating") as advance:
        batch = run_batch(llm, inputs, each, view.show, advance)
    plain = None
    if plain_llm and not batch.interrupted:
        with progress_bar(len(given), "without drafts") as advance:
            plain = run_batch(plain_llm, inputs, each, advance)
    view.end(batch, plain)
    if batch.interrupted or (plain and plain.interrupted):
        raise typer.Exit(130)
    if errors := [answer.error for answer in batch.answers if answer.error]:
        typer.echo(f"specdec: {len(errors)} of {len(given)} failed: {errors[0]}", err=True)
        raise typer.Exit(1)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Folder of a draft head.")],
    model: Annotated[
        Path | None,
        typer.Option(envvar="SPECDEC_MODEL", help="Folder of its target; default: the one it names, if that is here."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, nothing else.")] = False,
) -> None:
    """Tell what a draft head is, what it reads of its target, and what its files leave to be assumed.

    \b
    Examples:
      specdec inspect path/to/head
      specdec inspect path/to/head --model path/to/llama
      specdec inspect path/to/head --json
    """
    from specdec.cli.inspection import Inspection, show

    show(Inspection.of(path, model), as_json)
