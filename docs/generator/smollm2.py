"""Tables of heads of SmolLM2-135M-Instruct, from what `benchmarks/smollm2_heads.sh` measured."""

from collections.abc import Callable, Iterable

from docs.generator.peers import mode_name
from docs.generator.regions import table
from docs.generator.results import read, script_source, speed_cells

TEMPERATURES = (0, 1)
# Results of the speeds, and what each measures.
SPEEDS = {
    "speed": "bfloat16, one request",
    "speed_temperature_1": "the same, temperature 1",
    "speed_batch8": "8 requests, temperature 0",
    "speed_q4_1": "Q4_1 as shipped, one request",
}


def _source(files: str, names: Iterable[str]) -> str:
    shown = [f"smollm2_{name}" for name in names]
    return script_source("smollm2_heads.sh FOLDER spec-bench.jsonl", files, shown)


def _tau() -> str:
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


def _speeds() -> str:
    rows = []
    for name, title in SPEEDS.items():
        plain, *_ = modes = read(f"smollm2_{name}")["modes"]
        for mode in modes:
            differing = f"{mode['differing']} of {mode['prompts']}"
            rows.append([title, mode_name(mode["mode"]), *speed_cells(mode, plain), differing])
            title = ""
    header = ["weights", "mode", "tok/s", "over plain", "after the first token", "tau", "other tokens than plain"]
    return f"{table(header, rows)}\n\n{_source('smollm2_speed*', SPEEDS)}"


PARTS: dict[str, Callable[[], str]] = {"results-smollm2-tau": _tau, "results-smollm2-speed": _speeds}
