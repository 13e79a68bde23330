"""Fields that every benchmark writes beside its figures: machine, versions and commit."""

import json
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers

from specdec import DraftShape

RESULTS = Path(__file__).parent / "results"
PROMPTS = Path(__file__).parent / "prompts"


def circumstances() -> dict[str, Any]:
    """Hardware, versions, threads and commit of this run."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": _git("rev-parse", "--short", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def write(name: str, figures: dict[str, Any]) -> None:
    """Write `results/NAME.json` and print it as the last line."""
    document = {"benchmark": name, **circumstances(), **figures}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(document))


def read_prompts(name: str) -> list[list[dict[str, str]]]:
    """Conversations of `prompts/NAME.jsonl`, each ending with a user's turn."""
    lines = (PROMPTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"] for line in lines]


def parse_shape(text: str) -> DraftShape:
    """`depth,branching,nodes` with or without `,min_reach`."""
    depth, branching, nodes, *reach = text.split(",")
    return DraftShape(int(depth), int(branching), int(nodes), *map(float, reach))


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _git(*words: str) -> str:
    """Nothing where there is no git."""
    if shutil.which("git") is None:
        return ""
    return subprocess.run(
        ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    ).stdout.strip()
