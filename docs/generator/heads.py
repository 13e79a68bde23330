"""Tables of the demo's heads side by side: tau by nodes, and speed."""

from collections.abc import Callable

from docs.generator.regions import table
from docs.generator.results import KINDS, read, script_source, sourced, speed_cells

# Results of `benchmarks/heads.sh`, and what each measures.
RUNS = {
    "wide": "widened target (256M), one request",
    "wide_temperature_1": "the same, temperature 1",
    "wide_batch8": "the same, 8 requests, temperature 0",
    "demo": "demo target (8.4M), one request",
    "demo_batch8": "the same, 8 requests",
}
NAMES = {"eagle": "EAGLE-3", "eagle3": "EAGLE-3", "dspark": "DSpark"}


def _block_trees() -> str:
    found = {
        (row["prompts"], row["budget"], row["draft"], row["temperature"], row["kind"]): row["tau"]
        for row in read("block_trees")["rows"]
    }
    heads = {draft: "DSpark" if "dspark" in draft else "EAGLE-3" for _, _, draft, _, _ in found}
    budgets = sorted({budget for _, budget, *_ in found})
    temperatures = sorted({temperature for *_, temperature, _ in found})
    rows = [
        [kind, str(budget), name]
        + [f"{found[kind, budget, draft, t, form]:.2f}" for t in temperatures for form in ("chain", "tree")]
        for kind in KINDS
        for budget in budgets
        for draft, name in heads.items()
    ]
    columns = [f"{form}, temperature {t:g}" for t in temperatures for form in ("chain", "tree")]
    shown = sourced("block_trees", ["prompts", "nodes", "head", *columns], rows)
    return f"{shown} Run with `--draft eagle specdec/demo/dspark --prompts 60 --max-tokens 96`."


def _speeds(results: str, command: str, processor: str = "") -> str:
    """Return the speeds of a run of `heads.sh`; `results` names its files, `processor` tells more of the machine."""
    rows = []
    for name, title in RUNS.items():
        plain, *modes = read(f"{results}_{name}")["modes"]
        for mode in modes:
            part, _, last = mode["mode"].rpartition("/")
            head = "EAGLE-1" if part and last == "eagle" else NAMES[last]
            rows.append([title, head, *speed_cells(mode, plain)])
            title = ""
    names = [f"{results}_{name}" for name in RUNS]
    header = ["target", "head", "tok/s", "over plain", "after the first token", "tau"]
    return f"{table(header, rows)}\n\n{script_source(command, f'{results}_*', names, processor)}"


PARTS: dict[str, Callable[[], str]] = {
    "results-block-trees": _block_trees,
    "results-heads": lambda: _speeds("heads", "heads.sh FOLDER"),
    "results-heads-ice-lake": lambda: _speeds(
        "heads_ice_lake", "heads.sh FOLDER heads_ice_lake", ", AVX-512 without bfloat16"
    ),
}
