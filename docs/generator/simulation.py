"""Tables of the simulation of replicas."""

from collections.abc import Callable
from typing import Any

from docs.generator.regions import table
from docs.generator.results import read

_FIGURES = {
    "first_ms_mean": "time to first token, mean",
    "first_ms_nine_in_ten": "time to first token, nine in ten",
    "last_ms_mean": "time to last token, mean",
    "last_ms_nine_in_ten": "time to last token, nine in ten",
}


def _check() -> str:
    found = read("simulate")["one_replica"]
    rows = []
    for key, name in _FIGURES.items():
        each = found[key]
        rows.append([name, f"{each['real']:.0f} ms", f"{each['simulated']:.0f} ms", f"{each['ratio']:.2f}"])
    hits = found["prefix_hits"]
    shares = [f"{hits[key]:.0%}" for key in ("real", "simulated")]
    rows.append(["prompt tokens found in the cache", *shares, f"{hits['ratio']:.2f}"])
    document = read("simulate")
    where = f"{document['processor']}, {document['threads']} thread; commit {document['commit']}"
    source = f"Command: `python -m benchmarks.simulate`. Result: `benchmarks/results/simulate.json` ({where})."
    return f"{table(['one replica', 'real server', 'simulated', 'ratio'], rows)}\n\n{source}"


def _replicas() -> str:
    rows = []
    for name, found in _cases():
        for row in found["rows"]:
            # One replica has no choice.
            policy = row["policy"] if row["replicas"] > 1 else ""
            cells = [f"{row['load']:.0%}", str(row["replicas"]), policy, f"{row['prefix_hits']:.0%}"]
            times = (row["first_ms_mean"], row["first_ms_nine_in_ten"], row["last_ms_mean"])
            rows.append([name, *cells, *(f"{value:,.0f}" for value in times)])
    header = ["costs", "load", "replicas", "routing", "cached prompt tokens"]
    document = read("replicas")
    where = f"`benchmarks/results/replicas.json` (commit {document['commit']})"
    source = f"Command: `python -m benchmarks.replicas`. Result: {where}."
    return f"{table([*header, 'ms to first token, mean', 'nine in ten', 'ms to last token, mean'], rows)}\n\n{source}"


def _capacity() -> str:
    rows = []
    for name, found in _cases():
        costs, size = found["costs"], found["decoding_at_once"]
        index = costs["batches"].index(size)
        cells = [
            name,
            f"{found['kv_bytes_per_token']:,}",
            f"{1000 * costs['plain'][index]:.1f}",
            f"{costs['cycle'][index]:.2f}",
            f"{costs['tau'][index]:.2f}",
            f"{1000 * costs['token']:.2f}",
        ]
        for num_replicas, each in found["all_at_once"].items():
            model, simulated = each["model_requests_per_s"], each["simulated_requests_per_s"]
            own = [num_replicas, f"{each['uncached_prompt_tokens']:,.0f}", f"{model:.1f}", f"{simulated:.1f}"]
            rows.append([*cells, *own, f"{simulated / model:.2f}"])
    header = ["costs", "KV bytes per token", "ms per plain step", "c", "tau", "ms per prompt token", "replicas"]
    return table([*header, "uncached prompt tokens", "requests per second, model", "simulated", "ratio"], rows)


def _cases() -> list[tuple[str, dict[str, Any]]]:
    document = read("replicas")
    return [("this CPU, demo model", document["demo"]), ("assumed GPU, 8B", document["assumed_gpu"])]


PARTS: dict[str, Callable[[], str]] = {
    "simulation-check": _check,
    "simulation-replicas": _replicas,
    "simulation-capacity": _capacity,
}
