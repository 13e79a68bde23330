"""Tables of speeds beside llama.cpp, from what `benchmarks/peers.sh` measured."""

from collections.abc import Callable
from typing import Any

from docs.generator.regions import table
from docs.generator.results import read, script_source

# Results of `benchmarks/peers.sh`, and what each measures.
PEERS = {
    "wide": "widened demo target (256M), one request",
    "wide_batch8": "the same, 8 requests",
    "demo": "demo target (8.4M), one request",
    "demo_batch8": "the same, 8 requests",
    "smollm2": "SmolLM2-135M-Instruct, one request",
    "smollm2_batch8": "the same, 8 requests",
}
# Those of weights as a GGUF file stores them, which the README's table leaves out.
STORED = {"smollm2_q4_1": "SmolLM2-135M-Instruct as shipped, in Q4_1", "smollm2_q4_1_float32": "the same in float32"}


def _peers() -> str:
    rows = []
    for name, title in (PEERS | STORED).items():
        for mode in read(f"peers_{name}")["modes"]:
            first = mode["first_ms"]
            rows.append(
                [
                    title,
                    _mode_name(mode["mode"]),
                    f"{mode['tok_per_s']['median']:.0f}",
                    f"{mode['speedup']['median']:.2f}",
                    f"{mode['tau']:.2f}" if mode["tau"] else "",
                    f"{first['median']:.0f}" if first else "",
                    f"{mode['differing']} of {mode['prompts']}",
                ]
            )
            title = ""
    header = ["checkpoint", "mode", "tok/s", "over plain", "tau", "first token, ms", "other tokens than plain"]
    return f"{table(header, rows)}\n\n{_source(read('peers_wide'))}"


def _source(document: dict[str, Any]) -> str:
    return script_source("peers.sh FOLDER", "peers_*", document, ", AVX-512 with bfloat16")


def _readme_peers() -> str:
    """Return the README's table of speeds beside llama.cpp, over its own fastest plain decoding."""
    rows = []
    for name, title in PEERS.items():
        modes = read(f"peers_{name}")["modes"]
        fastest: dict[str, float] = {}
        for mode in modes:
            whose = "their" if mode["mode"].startswith("llama") else "our"
            drafts = mode["mode"].split(":")[0] not in ("plain", "llama.cpp")
            key = f"{whose} {'drafts' if drafts else 'plain'}"
            fastest[key] = max(fastest.get(key, 0.0), mode["tok_per_s"]["median"])
        plain = fastest["their plain"]
        cells = [
            f"{fastest[key] / plain:.2f}" if key in fastest else ""
            for key in ("our plain", "our drafts", "their drafts")
        ]
        rows.append([title, *cells])
    return table(["over llama.cpp without drafts", "specdec", "specdec with drafts", "llama.cpp with drafts"], rows)


def _mode_name(mode: str) -> str:
    """Return a mode of `specdec bench` without the names of files."""
    kind = next((kind for kind in ("bf16", "f16") if f"-{kind}" in mode), "")
    if "q4_1" in mode:
        return "llama.cpp, n-grams" if ":ngram" in mode else "llama.cpp"
    if mode.startswith("llama.cpp"):
        return f"llama.cpp, {kind}"
    if mode.startswith("llama-server"):
        return f"llama.cpp, {kind}, the same head, chains of 3"
    source, _, settings = mode.partition(":")
    names = {"plain": "specdec, no drafts", "ngram": "specdec, n-grams"}
    how = (
        "" if source in names else ", chains of 3" if "branching=1" in settings else ", fixed trees" if settings else ""
    )
    return names.get(source, "specdec, EAGLE-3") + how


def _first_token() -> str:
    """Return the time to the first token of prompts of 512 tokens."""
    document = read("peers_wide_first")
    own = document["modes"][0]["first_ms"]["median"]
    rows = [
        [_mode_name(mode["mode"]), f"{mode['first_ms']['median']:.0f}", f"{mode['first_ms']['median'] / own:.2f}"]
        for mode in document["modes"]
    ]
    return f"{table(['mode', 'first token, ms', 'over specdec'], rows)}\n\n{_source(document)}"


PARTS: dict[str, Callable[[], str]] = {
    "results-peers": _peers,
    "results-first-token": _first_token,
    "results-readme": _readme_peers,
}
