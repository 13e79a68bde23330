"""Plots of measured results. Each PNG carries a hash of its data and code, so that a test finds outdated ones."""

import hashlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from docs.generator.results import KINDS, SPEED_NAMES, read, rule_name, tau_by_rule

KEY = "specdec-inputs"
COLOURS = ("#1b7f5c", "#7fb8a4", "#c9a227", "#8c8c8c")
Plot = tuple[Callable[[], Any], Callable[[Figure, Any], None], tuple[float, float]]


def _tau_data() -> list[list[Any]]:
    return [[*key, value] for key, value in sorted(tau_by_rule().items()) if key[1] != "eagle1"]


def _draw_tau(figure: Figure, data: list[list[Any]]) -> None:
    rules = ["coupled", *sorted({rule for _, rule, _, _ in data} - {"coupled"}, reverse=True)]
    temperatures = sorted({row[2] for row in data})
    panels = figure.subplots(1, 2, sharey=True)
    for panel, kind in zip(panels, KINDS, strict=True):
        values = {(rule, t): tau for prompts, rule, t, tau in data if prompts == kind}
        for place, rule in enumerate(rules):
            # At temperature 0 all rules are one, and only the default is measured.
            present = [(index, values[rule, t]) for index, t in enumerate(temperatures) if (rule, t) in values]
            where = [index + 0.27 * (place - 1) for index, _ in present]
            heights = [height for _, height in present]
            bars = panel.bar(where, heights, 0.25, color=COLOURS[place], label=rule_name(rule).replace("`", ""))
            panel.bar_label(bars, fmt="%.1f", fontsize=7)
        panel.set_title(kind)
        panel.set_xticks(range(len(temperatures)), [f"temperature {t:g}" for t in temperatures])
    panels[0].set_ylabel("tau: tokens per target step")
    panels[0].legend(fontsize=7, loc="upper right")
    panels[0].set_ylim(0, 7.6)


def _draw_speed(figure: Figure, data: dict[str, float]) -> None:
    panel: Axes = figure.subplots()
    bars = panel.barh([SPEED_NAMES[key].replace("`", "") for key in data], list(data.values()), color=COLOURS[0])
    panel.bar_label(bars, fmt="%.0f", padding=3)
    panel.invert_yaxis()
    panel.set_xlabel("tokens per second, one request, demo model on 2 CPU cores")


def _throughput_data() -> dict[str, float]:
    ratios = read("throughput")["ratios"]
    return {name: row["sooner_than_transformers"] for name, row in ratios.items() if "one by one" not in name}


def _draw_throughput(figure: Figure, data: dict[str, float]) -> None:
    panel: Axes = figure.subplots()
    bars = panel.barh(list(data), list(data.values()), color=COLOURS[0])
    panel.bar_label(bars, fmt="%.2f", padding=3)
    panel.invert_yaxis()
    panel.set_xlabel("64 requests: speed over transformers in padded batches of 8")


def _learning_data() -> list[list[float]]:
    return [[row["tokens"], row["tau"]] for row in read("learning_curve")["rows"]]


def _draw_learning(figure: Figure, data: list[list[float]]) -> None:
    panel: Axes = figure.subplots()
    panel.plot([tokens / 1e6 for tokens, _ in data], [tau for _, tau in data], marker="o", color=COLOURS[0])
    panel.set_xlabel("million tokens trained on")
    panel.set_ylabel("tau (60 nodes, depth 6), held out")
    panel.set_ylim(0, max(tau for _, tau in data) + 0.5)


# Results of `never_slower`, and their models.
LOADS = {"never_slower_smollm2": "SmolLM2-135M-Instruct", "never_slower_wide": "widened demo target (256M)"}


def _load_data() -> dict[str, list[list[float]]]:
    """Return requests at once, tokens a second of plain decoding, of the best fixed trees and of adaptive ones."""
    found = {}
    for name, title in LOADS.items():
        cells = read(name)["cells"]
        rows = []
        for cell in cells:
            if cell["text"] == cells[0]["text"]:
                rates = cell["tokens_per_second"]
                fixed = max(rate for mode, rate in rates.items() if mode.isdigit())
                rows.append([cell["batch"], rates["plain"], fixed, rates["adaptive"]])
        found[title] = rows
    return found


def _draw_load(figure: Figure, data: dict[str, list[list[float]]]) -> None:
    for panel, (title, rows) in zip(figure.subplots(1, len(data)), data.items(), strict=True):
        batches, *lines = zip(*rows, strict=True)
        names = ("plain", "best trees of a fixed size", "adaptive trees")
        for values, label, colour in zip(lines, names, (COLOURS[3], COLOURS[2], COLOURS[0]), strict=True):
            panel.plot(batches, values, marker="o", markersize=3, label=label, color=colour)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        panel.set_xticks(batches, [f"{batch:g}" for batch in batches], fontsize=7)
        ticks = [2**power for power in range(5, 14) if min(map(min, lines)) / 2 < 2**power < 2 * max(map(max, lines))]
        panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
        panel.set_title(title)
        panel.set_xlabel("requests at once")
    figure.axes[0].set_ylabel("tokens per second")
    figure.axes[0].legend(fontsize=7, loc="lower right")


PLOTS: dict[str, Plot] = {
    "load": (_load_data, _draw_load, (8.0, 3.0)),
    "tau": (_tau_data, _draw_tau, (8.0, 3.2)),
    "speed": (lambda: read("speed")["tok_per_s_median"], _draw_speed, (8.0, 2.2)),
    "throughput": (_throughput_data, _draw_throughput, (8.0, 2.6)),
    "learning": (_learning_data, _draw_learning, (6.4, 2.8)),
}


def inputs(name: str) -> str:
    """Return the hash of a plot's data and of the code that draws it."""
    data, drawer, size = PLOTS[name]
    shown = json.dumps([data(), size, inspect.getsource(drawer)], sort_keys=True)
    return hashlib.sha256(shown.encode()).hexdigest()


def outdated(folder: Path) -> list[str]:
    """Return the names of the plots that are missing or show something else than the results."""
    return [name for name in PLOTS if _drawn_from(folder / f"{name}.png") != inputs(name)]


def _drawn_from(path: Path) -> str | None:
    if not path.exists():
        return None
    with Image.open(path) as image:
        found: str | None = image.info.get(KEY)
        return found


def draw(name: str, folder: Path) -> None:
    """Draw one plot as a PNG."""
    data, drawer, size = PLOTS[name]
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}):
        figure = Figure(figsize=size, layout="constrained")
        drawer(figure, data())
        figure.savefig(folder / f"{name}.png", dpi=130, metadata={KEY: inputs(name), "Software": None})
