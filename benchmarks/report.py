"""Shared parts of benchmarks: prompts, trees by name, and results with machine, versions and commit."""

import json
from pathlib import Path
from typing import Any

from specdec import DraftShape
from specdec.bench.environment import environment

RESULTS = Path(__file__).parent / "results"
PROMPTS = Path(__file__).parent / "prompts"


def write(name: str, figures: dict[str, Any]) -> None:
    """Write `results/NAME.json` and print it as the last line.

    Figures of code that is in no commit are printed and not written: nobody could measure them again.

    Raises:
        SystemExit: the work tree has uncommitted changes, other than in `results/`.
    """
    document = {"benchmark": name, **environment(), **figures}
    file = RESULTS / f"{name}.json"
    if document["uncommitted_changes"]:
        print(json.dumps(document))
        raise SystemExit(f"{file}: not written: the work tree has uncommitted changes; commit them and run again")
    RESULTS.mkdir(exist_ok=True)
    file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(document))


def read_prompts(name: str) -> list[list[dict[str, str]]]:
    """Conversations of `prompts/NAME.jsonl`, each ending with a user's turn."""
    lines = (PROMPTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"] for line in lines]


def parse_shape(text: str) -> DraftShape:
    """`depth,branching,nodes` with or without `,min_reach`."""
    depth, branching, nodes, *reach = text.split(",")
    return DraftShape(int(depth), int(branching), int(nodes), *map(float, reach))
