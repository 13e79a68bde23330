"""tau against tokens trained on, from the log of a training run.

python -m benchmarks.learning_curve --run build/demo/eagle3/run build/demo/eagle3-more/run

Of several runs each started from the head of the one before. tau is the engine's on conversations held out from
training, at temperature 0 and trees of up to 6, 10, 60.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.report import finish


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, nargs="+", required=True, help="folders with log.jsonl")
    parser.add_argument("--name", default="learning_curve", help="of the JSON file under benchmarks/results/")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for number, run in enumerate(args.run):
        before = rows[-1]["tokens"] if rows else 0
        lines = (run / "log.jsonl").read_text(encoding="utf-8").splitlines()
        records = [record for record in map(json.loads, lines) if "tau" in record]
        rows += [{**record, "run": number + 1, "tokens": before + record["tokens"]} for record in records]
    finish(args.name, {}, rows, ("tokens", "tau", "accepted_per_depth", "held_out_loss", "held_out_accuracy"))


if __name__ == "__main__":
    main()
