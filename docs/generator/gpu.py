"""Tables of what was measured on GPUs."""

from collections.abc import Callable, Sequence
from typing import Any

from docs.generator.regions import cells_table, table
from docs.generator.results import cited, read

# Kinds of kernels, by a part of their names; the first that fits. The rest are the last kind.
KINDS = (
    ("matrix products (cuBLAS)", ("nvjet", "cublas")),
    ("attention and its join", ("tree_attention_kernel", "join_parts_kernel")),
    ("norms, rotary embedding, activation, residuals", ("rms_norm", "rotary", "silu", "CUDAFunctor_add<c10::BFloat16")),
    ("other small kernels, most of them of drafting", ("",)),
)


def _source(command: str, file: str, document: dict[str, Any]) -> str:
    versions = (f"{name} {document[name]}" for name in ("torch", "triton", "commit"))
    return cited(command, file, document["gpu"], *versions)


def _cycle() -> str:
    """Return times of steps of an 8B model's shape with CUDA graphs, by batch."""
    document = read("h100/cycle")
    rows = [row for row in document["rows"] if row["mode"] == "graphs"]
    accepted = " / ".join(str(one["accepted"]) for one in rows[0]["cycles"])
    lines = [
        {
            "batch": str(row["batch"]),
            "plain step": f"{row['plain_ms']:.2f} ms",
            "of the speed of a copy": f"{row['share_of_copy_bound']:.0%}",
            "transformers' `generate` over it": f"{row['generate_over_plain']:.1f}",
            "its bare pass over it": f"{row['forward_over_plain']:.1f}",
            f"step with {accepted} drafts accepted": " / ".join(f"{one['cycle_ms']:.1f}" for one in row["cycles"])
            + " ms",
            "c": " / ".join(f"{one['c']:.2f}" for one in row["cycles"]),
            "times the speed of plain steps": " / ".join(f"{one['times_plain']:.2f}" for one in row["cycles"]),
        }
        for row in rows
    ]
    return f"{cells_table(lines)}\n\n{_source('bash benchmarks/gpu_day.sh cycle', 'h100/cycle', document)}"


def _time() -> str:
    """Return where the time of a step goes, by kind of kernel."""
    document = read("h100/steps_before")
    rows = document["rows"]
    columns = [_parts(row) for row in rows]
    lines = [[name, *(f"{column[name]:.2f}" for column in columns)] for name in columns[0]]
    header = ["milliseconds of a step", *(_heading(row) for row in rows)]
    return f"{table(header, lines)}\n\n{_source('bash benchmarks/gpu_day.sh steps', 'h100/steps_before', document)}"


def _heading(row: dict[str, Any]) -> str:
    kind = "plain" if row["accepted"] is None else "with drafts"
    return f"{kind}, batch {row['batch']}"


def _parts(row: dict[str, Any]) -> dict[str, float]:
    """Return milliseconds by kind of kernel, of gaps, and of the rest of the median, in which the GPU waits."""
    found = {kind: 0.0 for kind, _ in KINDS}
    for kernel in row["by_name"]:
        found[_kind(kernel["name"], KINDS)] += kernel["us"] / 1e3
    # Kernels that are not listed are small.
    found[KINDS[-1][0]] += row["busy_ms"] - sum(found.values())
    found["gaps between the kernels of a graph"] = row["small_gaps_ms"]
    found["the GPU waits for the host, without the profiler"] = row["median_ms"] - row["busy_ms"] - row["small_gaps_ms"]
    return found


def _kind(name: str, kinds: Sequence[tuple[str, tuple[str, ...]]]) -> str:
    return next(kind for kind, parts in kinds if any(part in name for part in parts))


def _counts() -> str:
    """Return what a step asks of the GPU, before and now."""
    document = read("gpu_counts")
    kinds = {
        "upload": "copies to the GPU",
        "operation": "operations of torch outside graphs",
        "launch": "launches of kernels outside graphs",
        "replay": "graphs",
        "left": "graphs that the GPU has still to run when the host knows the outcome",
    }
    columns = [document[when][which] for which in ("plain", "drafts") for when in ("before", "now")]
    lines = [[name, *(str(column[kind]) for column in columns)] for kind, name in kinds.items()]
    header = ["of a step", "plain, before", "plain", "with drafts, before", "with drafts"]
    return table(header, [*lines, ["copies from the GPU", *["1"] * len(columns)]])


def _kernels() -> str:
    """Return what the compiler gives each kernel, beside the least time of its bytes."""
    document = read("kernel_resources")
    lines = [
        {
            "kernel": row["kernel"],
            "of": f"{row['of']}: {', '.join(f'{name} {value}' for name, value in row['shape'].items())}",
            "programs": f"{row['programs']:,}",
            "warps": f"{row['warps']:,}",
            "registers a thread": f"{row['registers']:,}",
            "shared memory": f"{row['shared']:,}",
            "occupancy": f"{row['occupancy']:.0%}",
            "bytes": f"{row['bytes']:,}" if "bytes" in row else "",
            "bytes at once per multiprocessor, at most": f"{row['bytes_in_flight']:,}" if "bytes" in row else "",
            "at least, µs": f"{row['us_at_least']:,}" if "bytes" in row else "",
        }
        for row in document["rows"]
    ]
    facts = (f"{name} {document[name]}" for name in ("torch", "commit"))
    command = "TRITON_INTERPRET=1 python -m tests.kernels.resources"
    return f"{cells_table(lines)}\n\n{cited(command, 'kernel_resources', *facts)}"


def _host() -> str:
    """Return the host's time of a plain step, by requests and context."""
    document = read("host_step")
    lines = [
        [f"{row['batch']}", f"{row['context']:,}", f"{row['before']:.2f}", f"{row['now']:.2f}"]
        for row in document["rows"]
    ]
    facts = document["processor"], f"commit {document['commit']}"
    text = table(["requests", "context", "ms, before", "ms"], lines)
    return f"{text}\n\n{cited('python -m benchmarks.host_step --before TREE', 'host_step', *facts)}"


PARTS: dict[str, Callable[[], str]] = {
    "gpu-cycle": _cycle,
    "gpu-time": _time,
    "gpu-counts": _counts,
    "gpu-host": _host,
    "gpu-kernels": _kernels,
}
