"""Generate what the documents take from the code and from measured results.

    python -m docs.generate           # tables, indexes and plots: no model runs
    python -m docs.generate --runs    # also the pictures of real runs of the demo model

In a document, `<!-- generated: NAME -->` and `<!-- end generated -->` enclose a generated part; everything else is
written by hand. `tests/test_docs.py` checks that all of it is up to date.
"""

import argparse
from pathlib import Path

from docs.generator import (
    code_map,
    fewer_bits,
    gpu,
    heads,
    options,
    peers,
    pictures,
    plots,
    products,
    results,
)
from docs.generator.regions import fill, names

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
IMAGES = ROOT / "docs" / "images"
MODULES = (options, code_map, results, peers, heads, fewer_bits, products, gpu)
PARTS = {name: part for module in MODULES for name, part in module.PARTS.items()}


def documents() -> dict[Path, str]:
    """Return every document's path and up-to-date text."""
    texts = {path: path.read_text(encoding="utf-8") for path in DOCUMENTS}
    wanted = {name for text in texts.values() for name in names(text)}
    parts = {name: PARTS[name]() for name in wanted}
    return {path: fill(text, parts) for path, text in texts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", action="store_true", help="also run the demo model for its pictures")
    arguments = parser.parse_args()
    for path, text in documents().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))
    for name in plots.outdated(IMAGES):
        plots.draw(name, IMAGES)
        print(f"docs/images/{name}.png")
    if arguments.runs:
        pictures.draw(IMAGES)
        print("docs/images/terminal.svg, docs/images/tree.svg")


if __name__ == "__main__":
    main()
