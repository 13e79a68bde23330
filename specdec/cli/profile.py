"""`specdec profile`."""

import json
from dataclasses import asdict, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.bench.draft_profile import CALIBRATION_BINS, EDGES, DraftProfile
from specdec.bench.prompt_file import GivenPrompt, read_prompt_file
from specdec.building.llm_settings import engine_config
from specdec.cli.bench import DEMO_PROMPTS
from specdec.cli.model_options import SHOWN_DEFAULTS, Draft, Model, ModelOptions
from specdec.cli.options import Verbose, options_for, with_options
from specdec.cli.output_files import check_writable
from specdec.config import DEMO, EngineConfig, default_shape
from specdec.core.sampling_params import SamplingParams
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.scheduling.rank_values import FILE, write_values
from specdec.scheduling.step_cost import Curve, StepCost

if TYPE_CHECKING:
    from specdec.llm import LLM

SHAPE_DEFAULTS = {name: SHOWN_DEFAULTS[name] for name in ("depth", "branching", "nodes", "min_reach")}


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
    plot: Annotated[Path | None, typer.Option(help="Write plots to this PNG file; needs matplotlib.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, nothing else.")] = False,
    verbose: Verbose = False,  # noqa: ARG001
    **options: Any,
) -> None:
    """Measure what steps cost on this machine, and how often draft nodes are accepted.

    The prompts are answered one by one with the largest trees.

    \b
    Examples:
      specdec profile
      specdec profile --prompts prompts.jsonl --plot profile.png
      specdec profile --model path/to/llama --draft path/to/head --prompts prompts.jsonl --save
    """
    shape, settings = options_for(DraftShape, options), options_for(EngineConfig, options)
    # Report mistakes before importing torch.
    replace(default_shape("cpu"), **shape)
    engine_config(DEMO, None, settings)
    if draft in ("none", "ngram", "suffix"):
        raise ValueError(f"--draft {draft}: it has no probabilities; give a head or a small model")
    if plot is not None and find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed; run: pip install 'specdec[bench]'")
    if plot is not None:
        check_writable(plot, "--plot")
    given = read_prompt_file(prompts or DEMO_PROMPTS, False, "--prompts")

    own = {**settings, "adaptive_drafts": False, "max_num_seqs": 1}
    with ModelOptions(model, draft, {}, shape, own).load() as llm:
        found = _measure(llm, given, SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=0))
        if save:
            if not isinstance(llm.config.draft, Path):
                raise ValueError(f"--save: {draft} has no folder on this machine; give the folder of a head")
            typer.echo(f"values written to {write_values(found['rank_values'], llm.config.draft)}", err=True)
    print(json.dumps(found) if as_json else "\n".join(_lines(found)))
    if plot is not None:
        _draw(found, plot)


def _measure(llm: "LLM", prompts: list[GivenPrompt], params: SamplingParams) -> dict[str, Any]:
    """Return costs in milliseconds, values and their calibration, as JSON has them."""
    cost, trees = llm.engine.scheduler.step_cost, []
    assert cost is not None
    for prompt in prompts:
        states = list(llm.stream(prompt.for_engine(llm, None), params, trace=True))
        trees += [step.trace for step in states[-1].outputs[0].steps if step.trace is not None and step.trace.tokens]
    if len(trees) < 2:
        raise ValueError(f"{len(trees)} draft trees were verified; give longer answers by --max-tokens")
    values = DraftProfile.of(trees)
    return {
        "kernels": llm.engine.worker.cache.kernels.name,
        "dtype": llm.config.dtype,
        "trees": len(trees),
        **_costs(cost),
        "rank_values": [round(value, 4) for value in values.rank_values],
        "confidence_from": [0.0, *EDGES],
        "chances": [[asdict(chance) for chance in row] for row in values.chances],
        "calibration": [asdict(each) for each in values.calibration],
        "calibration_error": round(values.calibration_error, 4),
    }


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
    text += ["", "share of nodes accepted if their parent is (nodes), by confidence and rank among siblings"]
    text.append(f"  {'confidence':<14}" + "".join(f"{f'rank {rank}':>14}" for rank in range(len(found["chances"]))))
    bounds = [*found["confidence_from"], 1.0]
    for index, low in enumerate(bounds[:-1]):
        cells = (f"{row[index]['accepted']:.2f} ({row[index]['nodes']})" for row in found["chances"])
        text.append(f"  {f'{low:g} to {bounds[index + 1]:g}':<14}" + "".join(f"{cell:>14}" for cell in cells))
    text += [
        "",
        "calibration of values from half of the trees on the other half: predicted, accepted (nodes)",
    ]
    for index, each in enumerate(found["calibration"]):
        low, high = index / CALIBRATION_BINS, (index + 1) / CALIBRATION_BINS
        text.append(f"  {f'{low:g} to {high:g}':<14}{each['predicted']:.3f}  {each['accepted']:.3f}  ({each['nodes']})")
    text.append(f"calibration error {found['calibration_error']:.3f}")
    return text


def _draw(found: dict[str, Any], file: Path) -> None:
    """Plot the costs, the chances and their calibration.

    Raises:
        ValueError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    costs, chances, calibration = figure.subplots(1, 3)
    for label, key in (
        ("pass, by tokens", "pass_ms_by_tokens"),
        ("one level of drafting, by trees", "draft_level_ms_by_trees"),
        (f"{found['draft_levels']} levels of drafting, by trees", "draft_ms_by_trees"),
    ):
        costs.plot(*zip(*found[key], strict=True), marker="o", label=label)
    costs.set(title="Cost", xlabel="tokens, or trees", ylabel="ms", xscale="log", yscale="log")
    bounds = [*found["confidence_from"], 1.0]
    middles = [(low + high) / 2 for low, high in pairwise(bounds)]
    for rank, row in enumerate(found["chances"]):
        chances.plot(middles, [cell["accepted"] for cell in row], marker="o", label=f"rank {rank}")
    chances.set(title="Chances", xlabel="confidence of the draft model", ylabel="accepted if the parent is")
    bins = [each for each in found["calibration"] if each["nodes"]]
    calibration.plot([0, 1], [0, 1], color="grey", linewidth=1)
    calibration.plot([each["predicted"] for each in bins], [each["accepted"] for each in bins], marker="o")
    calibration.set(
        title=f"Calibration, error {found['calibration_error']:.3f}", xlabel="predicted value", ylabel="accepted"
    )
    for axes in (costs, chances):
        axes.legend()
    try:
        figure.savefig(file)
    except OSError as error:
        raise ValueError(f"--plot {file}: cannot be written: {error.strerror}") from None
