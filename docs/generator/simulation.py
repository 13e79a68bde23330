"""Tables of the simulation of replicas."""

from collections.abc import Callable

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
    document = read("simulate")
    rows = []
    for name, found in (
        ("this CPU, demo model", document["rows"]),
        ("assumed GPU, 8B", document["assumed_gpu"]["rows"]),
    ):
        for row in found:
            # One replica has no choice.
            if row["replicas"] > 1 or row["policy"] == "prefix":
                policy = row["policy"] if row["replicas"] > 1 else ""
                cells = [f"{row['load']:.0%}", str(row["replicas"]), policy, f"{row['prefix_hits']:.0%}"]
                times = (row["first_ms_mean"], row["first_ms_nine_in_ten"], row["last_ms_mean"])
                rows.append([name, *cells, *(f"{value:,.0f}" for value in times)])
    header = ["costs", "load", "replicas", "routing", "cached prompt tokens"]
    return table([*header, "ms to first token, mean", "nine in ten", "ms to last token, mean"], rows)


def _capacity() -> str:
    document = read("simulate")
    rows = []
    for name, found in (("this CPU, demo model", document), ("assumed GPU, 8B", document["assumed_gpu"])):
        capacity, costs = found["capacity"], found["costs"]
        index = costs["batches"].index(capacity["decoding_at_once"])
        rows.append(
            [
                name,
                f"{found['kv_bytes_per_token']:,}",
                f"{1000 * costs['plain'][index]:.1f}",
                f"{costs['cycle'][index]:.2f}",
                f"{costs['tau'][index]:.2f}",
                f"{1000 * costs['token']:.2f}",
                f"{capacity['model_requests_per_s']:.1f}",
                f"{capacity['simulated_requests_per_s']:.1f}",
            ]
        )
    header = ["costs", "KV bytes per token", "ms per plain step", "c", "tau", "ms per prompt token"]
    return table([*header, "requests per second, model", "simulated"], rows)


PARTS: dict[str, Callable[[], str]] = {
    "simulation-check": _check,
    "simulation-replicas": _replicas,
    "simulation-capacity": _capacity,
}
