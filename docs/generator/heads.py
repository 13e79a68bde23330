"""Tables of heads side by side: of the demo, and of SmolLM2-135M-Instruct."""

from collections.abc import Callable, Iterable

from docs.generator.peers import mode_name
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
TEMPERATURES = (0, 1)
# Results of `benchmarks/smollm2_heads.sh`, and what each measures.
SPEEDS = {
    "speed": "bfloat16, one request",
    "speed_temperature_1": "the same, temperature 1",
    "speed_batch8": "8 requests, temperature 0",
    "speed_q4_1": "Q4_1 as shipped, one request",
}


def _demo(results: str, command: str, processor: str = "") -> str:
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


def _source(files: str, names: Iterable[str]) -> str:
    shown = [f"smollm2_{name}" for name in names]
    return script_source("smollm2_heads.sh FOLDER spec-bench.jsonl", files, shown)


def _smollm2_tau() -> str:
    """Return tau by kind of prompt, head and temperature."""
    found = [read(f"smollm2_tau_{temperature}")["modes"][1:] for temperature in TEMPERATURES]
    columns = [(mode, temperature) for mode in range(len(found[0])) for temperature in range(len(TEMPERATURES))]
    rows = [
        [category.replace("_", " "), *(f"{found[t][mode]['categories'][category]['tau']:.2f}" for mode, t in columns)]
        for category in found[0][0]["categories"]
    ]
    rows.append(["all", *(f"{found[t][mode]['tau']:.2f}" for mode, t in columns)])
    names = [mode_name(mode["mode"]).removeprefix("specdec, ") for mode in found[0]]
    header = ["prompts", *(f"{names[mode]}, temperature {TEMPERATURES[t]}" for mode, t in columns)]
    return f"{table(header, rows)}\n\n{_source('smollm2_tau_*', [f'tau_{t}' for t in TEMPERATURES])}"


def _smollm2() -> str:
    rows = []
    for name, title in SPEEDS.items():
        plain, *_ = modes = read(f"smollm2_{name}")["modes"]
        for mode in modes:
            differing = f"{mode['differing']} of {mode['prompts']}"
            rows.append([title, mode_name(mode["mode"]), *speed_cells(mode, plain), differing])
            title = ""
    header = ["weights", "mode", "tok/s", "over plain", "after the first token", "tau", "other tokens than plain"]
    return f"{table(header, rows)}\n\n{_source('smollm2_speed*', SPEEDS)}"


PARTS: dict[str, Callable[[], str]] = {
    "results-heads": lambda: _demo("heads", "heads.sh FOLDER"),
    "results-heads-ice-lake": lambda: _demo(
        "heads_ice_lake", "heads.sh FOLDER heads_ice_lake", ", AVX-512 without bfloat16"
    ),
    "results-smollm2-tau": _smollm2_tau,
    "results-smollm2-speed": _smollm2,
}
