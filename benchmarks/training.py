"""Tokens a second and peak memory of training, both recipes on the demo target.

python -m benchmarks.training

Answers of the demo target to the prompts of the other benchmarks are what is trained on. Every measurement is a
process of its own, the two recipes in turns: resident size when the run is set up, its peak over some steps, and the
median of their times.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.report import finish, read_prompts, resident_mib

RUNS = Path(__file__).parents[1] / "runs"
RECIPES = {"eagle": RUNS / "demo-eagle.yaml", "eagle3": RUNS / "demo-eagle3.yaml"}
CHILD = "--child"


def prepare_data(folder: Path, answers: int) -> Path:
    """Write tokens and masks of `answers` answers, and return their folder."""
    from specdec import LLM, SamplingParams
    from specdec.config import DEMO
    from specdec.train_eagle.data.conversations import write_conversations
    from specdec.train_eagle.data.preparation import prepare
    from specdec.train_eagle.data.stage_settings import PrepareSettings

    llm = LLM(draft=None)
    chats = [messages for name in ("sgd-eval", "gsm8k-eval") for messages in read_prompts(name)]
    chats = (chats * -(-answers // len(chats)))[:answers]
    params = [SamplingParams(temperature=1, seed=i, max_tokens=128) for i in range(len(chats))]
    outputs = llm.generate([llm.chat_prompt(messages) for messages in chats], params)
    told = [
        [*messages, {"role": "assistant", "content": output.text}]
        for messages, output in zip(chats, outputs, strict=True)
        if output.text.strip()
    ]
    write_conversations(folder / "answers.jsonl", told)
    prepare(DEMO / "target", PrepareSettings(data=[str(folder / "answers.jsonl")], out=folder / "prepared"))
    return folder / "prepared"


def measure(recipe: str, data: Path, out: Path, steps: int) -> dict[str, Any]:
    """One run of a recipe, cut short."""
    from specdec.config import DEMO
    from specdec.train_eagle.training.read_config import read_config
    from specdec.train_eagle.training.train_run import TrainingRun

    settings = yaml.safe_load(RECIPES[recipe].read_text(encoding="utf-8"))
    own = {"model": DEMO / "target", "data": [data], "out": out, "evaluate_prompts": 0, "held_out": 4}
    run = TrainingRun(read_config({**settings, **own}))
    begun = resident_mib()
    seconds, tokens = [], []
    for step in range(min(steps + 1, run.total)):
        start = time.perf_counter()
        run.step(step)
        seconds.append(time.perf_counter() - start)
        tokens.append(sum(run.source.lengths[i] for i in run.batches[step]))
    return {
        "tokens_per_s": round(statistics.median(n / s for n, s in zip(tokens[1:], seconds[1:], strict=True)), 1),
        "before_mib": round(begun, 1),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="timed in each, after one that is not")
    parser.add_argument("--answers", type=int, default=400)
    parser.add_argument(CHILD, nargs=3, metavar=("RECIPE", "DATA", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        recipe, data, out = args.child
        print(json.dumps(measure(recipe, Path(data), Path(out), args.steps)))
        return
    found: dict[str, list[dict[str, Any]]] = {recipe: [] for recipe in RECIPES}
    with tempfile.TemporaryDirectory() as folder:
        data = prepare_data(Path(folder), args.answers)
        for number in range(args.rounds):
            for recipe, rows in found.items():
                out = Path(folder) / f"{recipe}-{number}"
                words = [sys.executable, "-m", "benchmarks.training", "--steps", str(args.steps), CHILD]
                done = subprocess.run([*words, recipe, str(data), str(out)], capture_output=True, text=True, check=True)
                rows.append(json.loads(done.stdout.splitlines()[-1]))
                print(recipe, rows[-1], flush=True)
    rows = []
    for recipe, runs in found.items():
        medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        settings = yaml.safe_load(RECIPES[recipe].read_text(encoding="utf-8"))
        kept = {name: settings[name] for name in ("unroll", "batch_tokens")}
        rows.append({"recipe": recipe, **kept, **medians, "runs": runs})
    finish("training", {}, rows, [name for name in rows[0] if name != "runs"])


if __name__ == "__main__":
    main()
