"""Tables of speeds beside other engines, from what `benchmarks/peers.sh` measured."""

from collections.abc import Callable

from docs.generator.regions import cells_table, table
from docs.generator.results import read, script_source

# Results of `benchmarks/peers.sh`, and what each measures.
PEERS = {
    "smollm2": "SmolLM2-135M-Instruct, one request",
    "smollm2_batch8": "the same, 8 requests",
    "smollm2_q8_0": "SmolLM2 in 8 bits, one request",
    "smollm2_q8_0_batch8": "the same, 8 requests",
    "smollm2_q4_1": "SmolLM2 in 4 bits, one request",
    "smollm2_q4_1_batch8": "the same, 8 requests",
    "wide": "widened demo target (256M), one request",
    "wide_batch8": "the same, 8 requests",
    "demo": "demo target (8.4M), one request",
    "demo_batch8": "the same, 8 requests",
}
# Those that the README shows.
LEADING = ("smollm2", "smollm2_batch8", "smollm2_q8_0", "smollm2_q4_1", "wide", "wide_batch8")
# Those of prompts of 512 tokens, and what each measures.
FIRST = {
    "smollm2": "SmolLM2-135M-Instruct",
    "smollm2_q8_0": "the same in 8 bits",
    "smollm2_q4_1": "the same in 4 bits",
    "wide": "widened demo target (256M)",
}
OURS, THEIRS = ("specdec", "specdec with drafts"), ("llama.cpp", "OpenVINO", "transformers")


def _peers() -> str:
    rows = []
    for name, title in PEERS.items():
        for mode in read(f"peers_{name}")["modes"]:
            first = mode["first_ms"]
            rows.append(
                {
                    "checkpoint": title,
                    "mode": mode_name(mode["mode"]),
                    "tok/s": f"{mode['tok_per_s']['median']:.0f}",
                    "over plain": f"{mode['speedup']['median']:.2f}",
                    "tau": f"{mode['tau']:.2f}" if mode["tau"] else "",
                    "first token, ms": f"{first['median']:.0f}" if first else "",
                    "other tokens than plain": f"{mode['differing']} of {mode['prompts']}",
                }
            )
            title = ""
    return f"{cells_table(rows)}\n\n{_source([f'peers_{name}' for name in PEERS])}"


def _source(names: list[str]) -> str:
    return script_source("peers.sh FOLDER SPEC_BENCH", "peers_*", names)


def _readme_peers() -> str:
    """Return the README's table: tokens a second of each engine, others by their fastest mode."""
    rows = []
    for name in LEADING:
        fastest: dict[str, float] = {}
        for mode in read(f"peers_{name}")["modes"]:
            key = _engine(mode["mode"])
            fastest[key] = max(fastest.get(key, 0.0), mode["tok_per_s"]["median"])
        rows.append([PEERS[name], *(f"{fastest[key]:.0f}" if key in fastest else "" for key in (*OURS, *THEIRS))])
    return table(["tokens a second", *OURS, *THEIRS], rows)


def _engine(mode: str) -> str:
    """Return the column of a mode in the README's table."""
    starts = {
        "plain": OURS[0],
        "llama": THEIRS[0],
        "xllama": THEIRS[0],
        "openvino": THEIRS[1],
        "transformers": THEIRS[2],
    }
    return next((column for start, column in starts.items() if mode.startswith(start)), OURS[1])


def mode_name(mode: str) -> str:
    """Return a mode of `specdec bench` without the names of files."""
    engine = _engine(mode)
    chains = ", chains of 3" if "branching=1" in mode or "tokens=3" in mode else ""
    if engine in OURS:
        heads = {",ngram": "EAGLE-3 and n-grams", "dspark": "DSpark"}
        drafts = next((name for end, name in heads.items() if mode.endswith(end)), "EAGLE-3")
        return "specdec, no drafts" if mode == "plain" else f"specdec, {drafts}{chains}"
    kind = next((f", {kind}" for kind in ("bf16", "f16") if f"-{kind}" in mode), "")
    if ":ngram" in mode:
        drafts = ", n-grams"
    elif "eagle3" in mode:
        drafts = f", the same head{chains or ', trees of 8'}"
    else:
        drafts = ""
    return engine + (", prebuilt" if mode.startswith("xllama") else "") + kind + drafts


def _first_token() -> str:
    """Return the time to the first token of prompts of 512 tokens."""
    rows = []
    for name, title in FIRST.items():
        modes = read(f"peers_{name}_first")["modes"]
        own = modes[0]["first_ms"]["median"]
        for mode in modes:
            took = mode["first_ms"]["median"]
            rows.append([title, mode_name(mode["mode"]), f"{took:.0f}", f"{took / own:.2f}"])
            title = ""
    header = ["checkpoint", "mode", "first token, ms", "over specdec"]
    return f"{table(header, rows)}\n\n{_source([f'peers_{name}_first' for name in FIRST])}"


PARTS: dict[str, Callable[[], str]] = {
    "results-peers": _peers,
    "results-first-token": _first_token,
    "results-readme": _readme_peers,
}
