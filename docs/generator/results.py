"""Tables of measured results, from the JSON files that the benchmarks write."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from docs.generator.regions import table

FOLDER = Path(__file__).parents[2] / "benchmarks" / "results"
KINDS = ("sgd-eval", "gsm8k-eval")


def read(name: str) -> dict[str, Any]:
    """Return a benchmark's result."""
    document: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return document


def source(name: str, module: str = "") -> str:
    """Return where a table comes from: command, file, machine and commit."""
    document = read(name)
    where = document["gpu"] or f"{document['processor']}, {document['threads']} threads"
    command = f"python -m benchmarks.{module or name}"
    return cited(command, name, where, f"torch {document['torch']}", f"commit {document['commit']}")


def cited(command: str, result: str, *facts: str) -> str:
    """Return a command, the file or files (with a star) of its results, and the facts that belong to them."""
    kind = "Results" if "*" in result else "Result"
    return f"Command: `{command}`. {kind}: `benchmarks/results/{result}.json` ({'; '.join(facts)})."


def script_source(command: str, files: str, names: Sequence[str], processor: str = "") -> str:
    """Return where a table of a shell script's results comes from.

    Args:
        files: what the results are called, with a star.
        names: the results in the table; machine and versions are those of the first.
        processor: what else is to be said of the processor.
    """
    documents = {name: read(name) for name in names}
    first = documents[names[0]]
    parts = [f"{first['processor']}, {first['threads']} threads{processor}", f"torch {first['torch']}"]
    parts += [f"{name} {first[name]}" for name in ("llama-cpp-python",) if name in first]
    by_commit: dict[str, list[str]] = {}
    for name, document in documents.items():
        by_commit.setdefault(document["commit"], []).append(f"`{name}`")
    own, *others = by_commit
    parts += [f"commit {own}", *(f"{', '.join(by_commit[commit])}: commit {commit}" for commit in others)]
    return cited(f"bash benchmarks/{command}", files, *parts)


def speed_cells(mode: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    """Return a mode's tokens per second, its speed and speed after the first token over plain decoding, and its tau."""
    speeds = mode["speedup"]
    return [
        f"{mode['tok_per_s']['median']:,.0f}",
        f"{speeds['median']:.2f} ({speeds['least']:.2f} to {speeds['most']:.2f})",
        f"{plain['per_token_ms']['median'] / mode['per_token_ms']['median']:.2f}",
        f"{mode['tau']:.2f}" if mode["tau"] else "",
    ]


def sourced(name: str, header: list[str], rows: list[list[str]], module: str = "") -> str:
    """Return a table, and below it where it comes from."""
    return f"{table(header, rows)}\n\n{source(name, module)}"


def row_table(name: str, columns: Mapping[str, str]) -> str:
    """Return a table of a result's rows: by heading, what `str.format` makes of a row."""
    rows = [[cell.format(**row) for cell in columns.values()] for row in read(name)["rows"]]
    return sourced(name, list(columns), rows)


def tau_by_rule() -> dict[tuple[str, str, float], float]:
    """Return tau by prompts, rule and temperature; the EAGLE-1 head's `coupled` is the rule `eagle1`."""
    found = {(row["prompts"], row["rule"], row["temperature"]): row["tau"] for row in read("acceptance")["rows"]}
    for row in read("acceptance_eagle1")["rows"]:
        if row["rule"] == "coupled":
            found[row["prompts"], "eagle1", row["temperature"]] = row["tau"]
    return found


def _tau() -> str:
    tau = tau_by_rule()
    rules = {rule: rule for _, rule, _ in tau}
    temperatures = sorted({temperature for _, _, temperature in tau})
    rows = [
        [kind, rule_name(rule), *(f"{tau[kind, rule, t]:.2f}" if (kind, rule, t) in tau else "" for t in temperatures)]
        for kind in KINDS
        for rule in rules
    ]
    header = ["prompts", "head and rule", *(f"temperature {t:g}" for t in temperatures)]
    return f"{sourced('acceptance', header, rows)} EAGLE-1 head: the same command with `--draft specdec/demo/eagle`."


def rule_name(rule: str) -> str:
    """Return how a table names a rule."""
    return {
        "coupled": "EAGLE-3, `coupled` (default)",
        "rejection, drawn": "EAGLE-3, `rejection`",
        "one-hot top-k": "EAGLE-3, top-k children (EAGLE-2, SGLang)",
        "eagle1": "EAGLE-1, `coupled`",
    }.get(rule, f"EAGLE-3, {rule}")


def _accepted_depths() -> str:
    rows = [
        [row["prompts"], f"{row['temperature']:g}", *(f"{share:.2f}" for share in row["accepted_share_per_depth"])]
        for row in read("acceptance")["rows"]
        if row["rule"] == "coupled"
    ]
    return sourced("acceptance", ["prompts", "temperature", *(f"depth {d}" for d in range(1, 7))], rows)


SPEED_NAMES = {
    "transformers": "transformers `generate`",
    "plain": "specdec, no drafts",
    "eagle": "specdec, EAGLE-3, adaptive trees (default)",
    "fixed": "specdec, EAGLE-3, `--fixed-drafts`",
}


def _speed() -> str:
    result = read("speed")
    speeds, by_prompts = result["tok_per_s_median"], result["over_plain_by_prompts"]
    rows = []
    for key, name in SPEED_NAMES.items():
        shares = by_prompts.get(key, {})
        cells = [f"{shares[kind]:.2f}" if kind in shares else "" for kind in KINDS]
        rows.append([name, f"{speeds[key]:.0f}", f"{speeds[key] / speeds['transformers']:.2f}", *cells])
    header = ["engine", "tok/s", "over transformers", "over no drafts: sgd-eval", "gsm8k-eval"]
    return sourced("speed", header, rows)


def _throughput() -> str:
    result = read("throughput")
    names = {"plain": "no drafts", "eagle": "EAGLE-3, adaptive trees", "fixed": "EAGLE-3, fixed trees"}
    rows = []
    for key, name in names.items():
        for arrival in ("at once", "Poisson"):
            ratios = result["ratios"][f"{key}, {arrival}"]
            rows.append(
                [name, arrival, f"{ratios['sooner_than_one_by_one']:.1f}", f"{ratios['sooner_than_transformers']:.1f}"]
            )
    header = ["drafts", "arrival", "over the same requests one by one", "over transformers in padded batches of 8"]
    return sourced("throughput", header, rows)


def _scheduling_cost() -> str:
    result = read("scheduling_cost")
    sizes = sorted({row["running"] for row in result["rows"]})
    kinds = {row["rows"]: None for row in result["rows"]}
    ms = {(row["rows"], row["running"]): row["ms"] for row in result["rows"]}
    rows = [[kind, *(f"{ms[kind, size]:.2f}" for size in sizes)] for kind in kinds]
    return sourced("scheduling_cost", ["ms per step", *(f"{size} running" for size in sizes)], rows)


def _soak() -> str:
    result = read("soak")
    stats, resident = result["stats"], result["resident_mib"]
    rows = [
        ["requests", f"{result['requests']:,}"],
        ["aborted", f"{stats['aborted']:,}"],
        ["preemptions", f"{stats['preemptions']:,}"],
        ["resident MiB after 2,000 requests", f"{resident['2000']:.1f}"],
        [f"resident MiB after {result['requests']:,}", f"{resident[str(result['requests'])]:.1f}"],
    ]
    return sourced("soak", ["", "count"], rows)


def _suffix() -> str:
    rows = [
        [
            row["workload"],
            row["draft"],
            str(row["requests"]),
            f"{row['tau']:.2f}",
            f"{row['nodes_per_step']:.1f}" if "nodes_per_step" in row else "",
            f"{row['speed_over_first']:.2f}" if "speed_over_first" in row else "",
        ]
        for row in read("suffix")["rows"]
    ]
    header = ["workload", "draft", "requests", "tau", "nodes a step", "speed over plain"]
    return sourced("suffix", header, rows, "suffix --size 6")


# FOLDER is what `python -m benchmarks.widen` wrote.
NEVER_SLOWER_WIDE = (
    "never_slower --model FOLDER/target --draft FOLDER/eagle3 --name never_slower_wide --requests 16 --max-tokens 64 "
    "--batches 1 2 3 4 6 8 16 32 64 --sizes 2 4 8 15"
)

NEVER_SLOWER_SMOLLM2 = (
    "never_slower --model smollm2 --draft heads/smollm2-135m-instruct-eagle3 --dataset spec-bench.jsonl "
    "--name never_slower_smollm2 --requests 16 --max-tokens 64 --batches 1 2 3 4 6 8 16 32 64 --sizes 2 4 8 15"
)


def _never_slower(name: str, command: str) -> str:
    cells = read(name)["cells"]
    sizes = [name for name in cells[0]["tokens_per_second"] if name.isdigit()]
    rows = []
    for cell in cells:
        rates = cell["tokens_per_second"]
        shown = [f"{rates[name]:,.0f}" for name in ("plain", *sizes, "adaptive")]
        rows.append([cell["text"], str(cell["batch"]), *shown, f"{cell['ratio']:.2f}"])
    fixed = [f"{size} node{'s' if size != '1' else ''}" for size in sizes]
    header = ["prompts", "requests at once", "plain", *fixed, "adaptive", "adaptive over best"]
    return sourced(name, header, rows, command)


PARTS: dict[str, Callable[[], str]] = {
    "results-tau": _tau,
    "results-depths": _accepted_depths,
    "results-speed": _speed,
    "results-throughput": _throughput,
    "results-never-slower": lambda: _never_slower("never_slower", "never_slower"),
    "results-never-slower-smollm2": lambda: _never_slower("never_slower_smollm2", NEVER_SLOWER_SMOLLM2),
    "results-never-slower-wide": lambda: _never_slower("never_slower_wide", NEVER_SLOWER_WIDE),
    "results-scheduling": _scheduling_cost,
    "results-chunks": partial(
        row_table,
        "chunked_prefill",
        {
            "drafts": "{drafts}",
            "tokens per step": "{max_num_batched_tokens}",
            "longest gap, in steps": "{gap_over_step:.1f}",
            "longest gap without the prompt, in steps": "{noise_over_step:.1f}",
        },
    ),
    "results-prefix": partial(
        row_table,
        "prefix_cache",
        {
            "drafts": "{drafts}",
            "arrival": "{arrival}",
            "prompt tokens": "{prompt_tokens:,}",
            "computed": "{computed:,}",
            "fewest possible": "{computed_at_least:,}",
            "time without cache / with": "{cold_over_warm_seconds:.1f}",
        },
    ),
    "results-kv-transfer": partial(
        row_table,
        "kv_transfer",
        {
            "blocks": "{blocks}",
            "ms to the first token": "{first_token_ms:,.0f}",
            "times as fast": "{recomputed_over_this:.1f}",
            "prompt tokens computed": "{computed}",
            "loaded": "{loaded:,}",
            "tau": "{tau:.2f}",
        },
    ),
    "results-training": partial(
        row_table,
        "training",
        {
            "head": "{recipe}",
            "unrolled passes": "{unroll}",
            "tokens per second": "{tokens_per_s:,.0f}",
            "peak resident MiB": "{peak_mib:,.0f}",
        },
    ),
    "results-soak": _soak,
    "results-suffix": _suffix,
    "results-draft-store": partial(
        row_table,
        "draft_store",
        {
            "tokens": "{tokens:,}",
            "bytes per token": "{bytes_per_token:g}",
            "MB": "{memory_mb:,.0f}",
            "µs per token stored": "{us_per_token_stored:.2f}",
            "µs per search": "{us_per_search:.0f}",
        },
    ),
}
