"""Tables of the demo's heads side by side."""

from collections.abc import Callable

from docs.generator.regions import table
from docs.generator.results import read, script_source, speed_cells

# Results of `benchmarks/heads.sh`, and what each measures.
RUNS = {
    "wide": "widened target (256M), one request",
    "wide_temperature_1": "the same, temperature 1",
    "wide_batch8": "the same, 8 requests, temperature 0",
    "demo": "demo target (8.4M), one request",
    "demo_batch8": "the same, 8 requests",
}
NAMES = {"eagle": "EAGLE-3", "eagle3": "EAGLE-3", "dspark": "DSpark"}


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
    "results-heads": lambda: _speeds("heads", "heads.sh FOLDER"),
    "results-heads-ice-lake": lambda: _speeds(
        "heads_ice_lake", "heads.sh FOLDER heads_ice_lake", ", AVX-512 without bfloat16"
    ),
}
