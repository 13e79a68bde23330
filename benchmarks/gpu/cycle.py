"""The engine's step at the shape of Llama-3.1-8B: plain, and with a forced number of accepted drafts.

A stage of `benchmarks.gpu.day`. Times are medians of steps; the kinds of steps take turns, with CUDA graphs and
without. c is the time of a speculative step over that of a plain step of the same mode. The bound is the time in which
a plain copy reads and writes as many bytes as a step must read of weights and cached entries. Beside them are
transformers' `generate` and its bare pass at the same batch and context.
"""

import statistics
import time
from itertools import product
from typing import Any

import torch
from rich.table import Table

from benchmarks.gpu.cycle_engines import Engines, timed
from benchmarks.gpu.cycle_sizes import FULL, HEADS, MODES, TINY
from benchmarks.gpu.stage import Stage
from benchmarks.gpu.transformers_steps import TransformersSteps

COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 22}


def run(stage: Stage) -> None:
    """Measure every head and batch for which there is time; each head has its share of it."""
    sizes = TINY if stage.rehearse else FULL
    engines, peer = Engines(sizes, stage.device), TransformersSteps(sizes, stage.device)
    bandwidth = copy_bandwidth(stage.device)
    rows: list[dict[str, Any]] = []
    cut: list[str] = []
    stage.figures |= {"copy_gb_per_s": round(bandwidth / 1e9, 1), "shape": sizes.shape, "rows": rows, "cut": cut}
    start, seconds = time.monotonic(), stage.seconds_left
    peers: dict[int, dict[str, float]] = {}
    for number, (kind, batch) in enumerate(product(HEADS, sizes.batches)):
        place, of_head = divmod(number, len(sizes.batches))
        try:
            if time.monotonic() - start > seconds * (place + 1) / len(HEADS):
                raise TimeoutError("its share of the time was over")
            if of_head == 0:
                engines.use(kind)
            if batch not in peers:
                peers[batch] = {"generate": peer.generate(batch), "forward": peer.forward(batch)}
            found = measure(engines, batch, peers[batch], bandwidth)
        except (TimeoutError, torch.OutOfMemoryError) as caught:
            cut.append(f"{kind}, batch {batch}: {str(caught).splitlines()[0]}")
            stage.show(f"not measured: {cut[-1]}")
            continue
        for row in found:
            rows.append({"head": kind, "batch": batch, "context": sizes.context, **row})
            stage.show(str(rows[-1]))
    stage.table = table_of(rows)
    if stage.rehearse:
        stage.failures += cut


def measure(engines: Engines, batch: int, peers: dict[str, float], bandwidth: float) -> list[dict[str, Any]]:
    """A row of figures for each mode."""
    sizes = engines.sizes
    plain: dict[str, list[float]] = {mode: [] for mode in MODES}
    plain_passes: dict[str, list[float]] = {mode: [] for mode in MODES}
    tree_passes: dict[str, list[float]] = {mode: [] for mode in MODES}
    cycles: dict[str, dict[int, list[float]]] = {mode: {number: [] for number in sizes.accepted} for mode in MODES}
    for _, mode in product(range(sizes.rounds), MODES):
        whole, passes = engines.steps(engines.plain[mode], batch)
        plain[mode] += whole
        plain_passes[mode] += passes
        for accepted in sizes.accepted:
            engines.forced[mode].accepted = accepted
            whole, passes = engines.steps(engines.eagle[mode], batch)
            cycles[mode][accepted] += whole
            tree_passes[mode] += passes
    bound = (engines.weight_bytes + batch * sizes.context * engines.entry_bytes) / bandwidth
    rows = []
    for mode in MODES:
        step = statistics.median(plain[mode])
        tree = statistics.median(tree_passes[mode])
        row = {
            "mode": mode,
            "plain_ms": round(step * 1e3, 3),
            "share_of_copy_bound": round(bound / step, 3),
            "generate_over_plain": round(peers["generate"] / step, 2),
            "forward_over_plain": round(peers["forward"] / step, 2),
            "verification_over_plain": round(tree / statistics.median(plain_passes[mode]), 3),
            "cycles": [
                {
                    "accepted": accepted,
                    "cycle_ms": round(statistics.median(times) * 1e3, 3),
                    "c": round(statistics.median(times) / step, 3),
                    "times_plain": round((1 + accepted) * step / statistics.median(times), 2),
                }
                for accepted, times in cycles[mode].items()
            ],
        }
        rows.append(row)
    return rows


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of a plain copy."""
    source = torch.ones(COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = [timed(device, lambda: target.copy_(source))[1] for _ in range(10)]
    return 2 * source.nbytes / min(seconds)


def table_of(rows: list[dict[str, Any]]) -> Table:
    names = ("head", "batch", "mode", "plain_ms", "share_of_copy_bound", "generate_over_plain", "forward_over_plain")
    table = Table(*(name.replace("_", " ") for name in names), "accepted: c")
    for row in rows:
        cs = ", ".join(f"{one['accepted']}: {one['c']}" for one in row["cycles"])
        table.add_row(*(str(row[name]) for name in names), cs)
    return table
