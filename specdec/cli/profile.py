"""`specdec profile`."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.bench.prompt_file import GivenPrompt, read_prompt_file
from specdec.cli.bench import DEMO_PROMPTS
from specdec.cli.model_options import SHAPE_DEFAULTS, Draft, Model, ModelOptions
from specdec.cli.options import Verbose, with_options
from specdec.config import EngineConfig
from specdec.core.outputs import TreeTrace
from specdec.core.sampling_params import SamplingParams
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.scheduling.rank_values import FILE, write_values
from specdec.scheduling.step_cost import Curve, StepCost

if TYPE_CHECKING:
    from specdec.llm import LLM


@with_options(DraftShape, EngineConfig, defaults=SHAPE_DEFAULTS)
def profile(
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL file of prompts, as of generate; default: 16 built-in prompts.")
    ] = None,
    model: Model = None,
    draft: Draft = "auto",
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", metavar="N", min=2, help="Most tokens of an answer.")
    ] = 128,
    temperature: Annotated[float, typer.Option("--temperature", "-t", metavar="X", min=0.0, help="Of sampling.")] = 0.0,
    save: Annotated[
        bool, typer.Option("--save", help=f"Write the values of ranks beside the draft model's weights, as {FILE}.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, nothing else.")] = False,
    verbose: Verbose = False,  # noqa: ARG001
    **options: Any,
) -> None:
    """Measure what steps cost on this machine, and how often draft nodes are accepted, by their rank.

    The prompts are answered one by one with the largest trees.

    \b
    Examples:
      specdec profile
      specdec profile --prompts prompts.jsonl --json
      specdec profile --model path/to/llama --draft path/to/head --prompts prompts.jsonl --save
    """
    model_options = ModelOptions.of(model, draft, {**options, "adaptive_drafts": False, "max_num_seqs": 1})
    given = read_prompt_file(prompts or DEMO_PROMPTS, False, "--prompts")

    with model_options.load() as llm:
        if llm.config.draft is None:
            raise ValueError(f"--draft {draft}: no draft model, so nodes have no ranks; give a head or a small model")
        found = _measure(llm, given, SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=0))
        if save:
            typer.echo(f"values written to {write_values(found['rank_values'], llm.config.draft)}", err=True)
    print(json.dumps(found) if as_json else "\n".join(_lines(found)))


def _measure(llm: "LLM", prompts: list[GivenPrompt], params: SamplingParams) -> dict[str, Any]:
    """Return costs in milliseconds and values of ranks, as JSON has them."""
    cost, trees = llm.engine.scheduler.step_cost, []
    assert cost is not None
    for prompt in prompts:
        states = list(llm.stream(prompt.for_engine(llm, None, params), params, trace=True))
        trees += [step.trace for step in states[-1].outputs[0].steps if step.trace is not None and step.trace.tokens]
    if len(trees) < 2:
        raise ValueError(f"{len(trees)} draft trees were verified; give longer answers by --max-tokens")
    return {
        "kernels": llm.engine.worker.cache.kernels.name,
        "dtype": llm.config.dtype,
        "trees": len(trees),
        **_costs(cost),
        "rank_values": [round(value, 4) for value in rank_values(trees)],
    }


def rank_values(trees: Sequence[TreeTrace]) -> list[float]:
    """Return by rank the share of the trees with such a node in which it was accepted.

    Ranks are those by the draft model's own values in a tree, its most probable node first.
    """
    hits, trees_with = Counter[int](), Counter[int]()
    for tree in trees:
        # Nodes of chains, behind the model's, have no value.
        values = [value for value in tree.values if value is not None]
        accepted = set(tree.path)
        for rank, node in enumerate(sorted(range(len(values)), key=lambda node: -values[node])):
            trees_with[rank] += 1
            hits[rank] += node in accepted
    return [hits[rank] / trees_with[rank] for rank in sorted(trees_with)]


def _costs(cost: StepCost) -> dict[str, Any]:
    return {
        "pass_ms_by_tokens": _points(cost.passes),
        "more_ms_by_rows": _points(cost.rows),
        "draft_level_ms_by_trees": _points(cost.first_level),
        "draft_ms_by_trees": _points(cost.all_levels),
        "draft_levels": cost.depth,
        "reading_ms_by_tokens": _points(cost.reading),
    }


def _points(curve: Curve) -> list[list[float]]:
    return [[x, round(1e3 * y, 3)] for x, y in zip(curve.xs, curve.ys, strict=True)]


def _lines(found: dict[str, Any]) -> list[str]:
    """Return the report for people."""
    text = [f"kernels {found['kernels']}, {found['dtype']}", "", "milliseconds of"]
    for label, key in (
        ("a pass, by tokens", "pass_ms_by_tokens"),
        ("several rows, in addition", "more_ms_by_rows"),
        ("one level of drafting, by trees", "draft_level_ms_by_trees"),
        (f"{found['draft_levels']} levels of drafting, by trees", "draft_ms_by_trees"),
        ("the draft head's reading, by tokens", "reading_ms_by_tokens"),
    ):
        text.append(f"  {label:<36}" + "  ".join(f"{x:g}: {y:.2f}" for x, y in found[key]))
    ranks = "  ".join(f"{value:.2f}" for value in found["rank_values"])
    text += ["", f"values of the nodes by rank, over {found['trees']} trees", f"  {ranks}"]
    return text
