"""Plots of a comparison's results. Needs matplotlib, which the extra `bench` installs."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specdec.bench.comparison import ModeResult, Results
from specdec.bench.report import short_label

COLOURS = ("#1b7f5c", "#7fb8a4", "#c9a227", "#8c8c8c")


def draw(results: Results, file: Path) -> None:
    """Draw tokens per second, unless time was not measured, and acceptance by depth."""
    drafting = [mode for mode in results.modes if mode.figures.accepted_per_depth]
    panels: list[Any] = [_draw_speeds] if results.comparison.kind != "acceptance" else []
    panels += [_draw_depths] if drafting else []
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}):
        figure = Figure(figsize=(8, 0.6 + len(panels) * (1 + 0.3 * len(results.modes))), layout="constrained")
        for panel, draw_panel in zip(figure.subplots(max(len(panels), 1), squeeze=False)[:, 0], panels, strict=False):
            draw_panel(panel, results.modes)
        figure.savefig(file, dpi=130)


def _draw_speeds(panel: Axes, modes: list[ModeResult]) -> None:
    known = [(mode, mode.figures.tok_per_s) for mode in modes if mode.figures.tok_per_s]
    labels, spreads = [short_label(mode.label) for mode, _ in known], [spread for _, spread in known]
    medians = [spread.median for spread in spreads]
    errors = [[one.median - one.least for one in spreads], [one.most - one.median for one in spreads]]
    bars = panel.barh(labels, medians, xerr=errors, color=COLOURS[0], ecolor=COLOURS[3])
    ratios = [mode.figures.speedup for mode, _ in known]
    panel.bar_label(bars, [f"{ratio.median:.2f}" if ratio else "" for ratio in ratios], padding=6, fontsize=8)
    panel.margins(x=0.2)
    panel.invert_yaxis()
    panel.set_xlabel("tokens per second (ratio to plain); bars: median, lines: least to most")


def _draw_depths(panel: Axes, modes: list[ModeResult]) -> None:
    for place, mode in enumerate(mode for mode in modes if mode.figures.accepted_per_depth):
        shares = mode.figures.accepted_per_depth
        panel.plot(
            range(1, len(shares) + 1),
            shares,
            marker="o",
            color=COLOURS[place % len(COLOURS)],
            label=short_label(mode.label),
        )
    panel.set_xlabel("depth")
    panel.set_ylabel("share of steps accepted")
    panel.set_ylim(0, 1.02)
    panel.legend(fontsize=8)
