"""A comparison's results as tables for people and as JSON for programs."""

from typing import Any

from rich.console import Console
from rich.table import Table

from specdec.bench.comparison import Results
from specdec.bench.figures import Figures, Spread
from specdec.draft_heads.drafting.draft_shape import DraftShape

# Columns where the output is no terminal.
WIDTH = 140
# Most characters of a mode's name.
LABEL = 36
# Figures that say nothing where time is not measured.
TIMED = ("tok_per_s", "speedup", "cost", "first_ms", "per_token_ms")


def to_json(results: Results) -> dict[str, Any]:
    """Return the results as values for JSON."""
    comparison, timed = results.comparison, results.comparison.kind != "acceptance"
    return {
        "benchmark": f"bench {comparison.kind}",
        **results.facts,
        "dataset": comparison.dataset,
        "prompts": len(comparison.prompts),
        "temperature": comparison.params.temperature,
        "max_tokens": comparison.params.max_tokens,
        "ignore_eos": comparison.params.ignore_eos,
        **({"rounds": comparison.rounds, "warmup_rounds": comparison.warmup} if timed else {}),
        "request_rate": comparison.request_rate,
        "modes": [
            {
                "mode": mode.label,
                **mode.configuration,
                **_figures(mode.figures, timed),
                **({"tok_per_s_by_round": mode.tok_per_s} if timed else {}),
                "categories": {name: _figures(figures, timed) for name, figures in mode.categories.items()},
            }
            for mode in results.modes
        ],
    }


def _figures(figures: Figures, timed: bool) -> dict[str, Any]:
    values = {name: value._asdict() if isinstance(value, Spread) else value for name, value in vars(figures).items()}
    return {name: value for name, value in values.items() if timed or name not in TIMED}


def show(results: Results) -> None:
    """Print the tables."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    timed = results.comparison.kind != "acceptance"
    if timed:
        console.print(_speeds(results))
    if not timed or any(mode.figures.accepted_per_depth for mode in results.modes):
        console.print(_acceptance(results, timed))
    if results.modes[0].categories:
        console.print(_categories(results, timed))
    console.print(_caption(results), style="dim", highlight=False, soft_wrap=True)


def _speeds(results: Results) -> Table:
    table = _table("mode", "tok/s", "speed-up", "tau", "c", "first token (ms)", "per token (ms)", "differ")
    for mode in results.modes:
        figures = mode.figures
        table.add_row(
            short_label(mode.label),
            _spread(figures.tok_per_s, 1),
            _spread(figures.speedup, 2),
            _number(figures.tau, 2),
            _median(figures.cost, 2),
            _median(figures.first_ms, 1),
            _median(figures.per_token_ms, 2),
            _differing(figures),
        )
    return table


def _acceptance(results: Results, timed: bool) -> Table:
    """Return nodes, the share of steps in which each depth was accepted, and what the table of speeds has besides."""
    deepest = max(len(mode.figures.accepted_per_depth) for mode in results.modes)
    depths = [f"depth {depth}" for depth in range(1, deepest + 1)]
    table = _table("mode", *([] if timed else ["tau", "differ"]), "nodes per step", *depths)
    for mode in results.modes:
        figures = mode.figures
        shares = [f"{share:.2f}" for share in figures.accepted_per_depth]
        others = [] if timed else [_number(figures.tau, 2), _differing(figures)]
        table.add_row(short_label(mode.label), *others, _number(figures.nodes_per_step, 1), *shares)
    return table


def _categories(results: Results, timed: bool) -> Table:
    """Return speed-up and tau by kind of text; requests that run together have no speed of their own."""
    alone = timed and results.comparison.kind == "latency"
    table = _table("category", "mode", "prompts", *(["tok/s", "speed-up"] if alone else []), "tau", "differ")
    for category in results.modes[0].categories:
        for place, mode in enumerate(results.modes):
            figures = mode.categories[category]
            speeds = [_spread(figures.tok_per_s, 1), _spread(figures.speedup, 2)] if alone else []
            table.add_row(
                "" if place else category,
                short_label(mode.label),
                str(figures.prompts),
                *speeds,
                _number(figures.tau, 2),
                _differing(figures),
            )
    return table


def _caption(results: Results) -> str:
    comparison, facts = results.comparison, results.facts
    where = facts["gpu"] or f"{facts['processor']}, {facts['threads']} threads"
    lines = [f"{where}; {results.modes[0].configuration['dtype']}; {facts['model']}."]
    prompts = (
        f"{len(comparison.prompts)} prompts of {comparison.dataset}, at most {comparison.params.max_tokens} tokens"
    )
    if comparison.kind == "acceptance":
        lines.append(f"{prompts}, temperature {comparison.params.temperature:g}.")
    else:
        how = "one at a time" if comparison.kind == "latency" else "all at once"
        if comparison.request_rate:
            how = f"{comparison.request_rate:g} arrivals per second"
        lines.append(
            f"{prompts}, temperature {comparison.params.temperature:g}, {how}. Median (least–most) of "
            f"{comparison.rounds} interleaved rounds. c: time of a step over a plain step."
        )
    if trees := _trees(results):
        lines.append(f"tau is that of draft trees of {trees}.")
    lines.append("differ: prompts whose tokens are not plain decoding's.")
    return "\n".join(lines)


def _trees(results: Results) -> str:
    """Return the largest draft trees of the modes: one description if all modes have the same, else each mode's own."""
    shapes = {mode.label: mode.configuration.get("shape") for mode in results.modes}
    sizes = {short_label(label): DraftShape(**shape).in_words for label, shape in shapes.items() if shape}
    if len(set(sizes.values())) <= 1:
        return "".join(f"at most {size}" for size in dict.fromkeys(sizes.values()))
    return ", ".join(f"at most {size} for {label}" for label, size in sizes.items())


def short_label(label: str) -> str:
    """Return both ends of a long label: the mode, and what tells its file or settings from others."""
    return label if len(label) <= LABEL else f"{label[: LABEL // 2]}…{label[1 - LABEL // 2 :]}"


def _table(*columns: str) -> Table:
    table = Table()
    for column in columns:
        table.add_column(column, justify="left" if column in ("mode", "category") else "right")
    return table


def _spread(spread: Spread | None, digits: int) -> str:
    if spread is None:
        return ""
    median, least, most = (f"{value:.{digits}f}" for value in spread)
    return median if least == most else f"{median} ({least}–{most})"


def _median(spread: Spread | None, digits: int) -> str:
    return "" if spread is None else f"{spread.median:.{digits}f}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _differing(figures: Figures) -> str:
    return "" if figures.differing is None else f"{figures.differing} of {figures.prompts}"
