"""Peak memory of each rank of an engine, beside that of a single process.

python -m benchmarks.rank_memory --model FOLDER
python -m benchmarks.rank_memory --random

With `--draft FOLDER`, a draft model split over the ranks beside a whole one on each, and none; `--random` makes a
target and an EAGLE-3 head of random weights. Every engine runs in a process of its own, answers a few prompts, and
then the peaks of its ranks are read from /proc: `private` is memory of the process alone (RssAnon, sampled), `resident`
also counts mapped files, such as libraries and those pages of the checkpoint that the rank has read (VmHWM). `idle` is
the private memory of a process that has loaded nothing yet.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.report import write

PROMPT = list(range(10, 138))
MIB = 1024
# 128M parameters; the head has 54M, of which 3M in `fc` are not split, and uses the target's embedding.
RANDOM = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": 4,
}


def field(pid: int | str, name: str) -> float:
    """Return a memory field of a process in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / MIB


class Peaks(threading.Thread):
    """Watches this process and its children.

    Attributes:
        private: largest RssAnon seen of each process, MiB.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.private: dict[int, float] = {}
        self.resident: dict[int, float] = {}
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.01):
            tasks = Path("/proc/self/task").iterdir()
            pids = [Path("/proc/self").resolve().name]
            pids += [pid for task in tasks for pid in (task / "children").read_text(encoding="ascii").split()]
            for pid in map(int, pids):
                # A child may have ended.
                with suppress(OSError, StopIteration):
                    self.private[pid] = max(self.private.get(pid, 0.0), field(pid, "RssAnon"))
                    self.resident[pid] = field(pid, "VmHWM")

    def stop(self) -> None:
        self._done.set()
        self.join()


def measure(model: Path, draft: Path | None, ranks: int, draft_ranks: int, dtype: str) -> None:
    """Print the peaks of an engine's ranks, MiB."""
    peaks = Peaks()
    peaks.start()
    from specdec import LLM, SamplingParams

    idle = field("self", "RssAnon")
    sizes: dict[str, Any] = {"tensor_parallel_size": ranks, "draft_tensor_parallel_size": draft_ranks}
    llm = LLM(model, draft, dtype=dtype, kv_cache_memory=1 << 26, prefill_stretch=0, **sizes)
    llm.generate([PROMPT] * 4, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    time.sleep(0.1)
    peaks.stop()
    llm.close()
    found = {"idle": [idle], "private": list(peaks.private.values()), "resident": list(peaks.resident.values())}
    print(json.dumps({name: [round(value, 1) for value in values] for name, values in found.items()}))


def save_random(folder: Path) -> tuple[Path, Path]:
    """Write a target and an EAGLE-3 head of random weights; return their folders."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from specdec.draft_heads.formats.head_kinds import KINDS
    from specdec.draft_heads.heads.eagle3 import Eagle3Config, Eagle3Head
    from specdec.models.llama import read_llama_config

    LlamaForCausalLM(LlamaConfig(**RANDOM)).save_pretrained(folder / "target")
    sizes = replace(read_llama_config(folder / "target"), num_layers=1)
    head = Eagle3Head(Eagle3Config(sizes, (1, 2, 3), sizes.hidden_size, sizes.vocab_size))
    KINDS["eagle3"].save(head, folder / "head", {}, torch.float32)
    return folder / "target", folder / "head"


def peaks_of(model: Path, draft: Path | None, ranks: int, draft_ranks: int, dtype: str) -> dict[str, list[float]]:
    """Return the peaks of an engine in a process of its own, MiB."""
    options = ["--model", str(model), "--dtype", dtype, "--one", str(ranks), str(draft_ranks)]
    options += ["--draft", str(draft)] if draft else []
    command = [sys.executable, "-m", "benchmarks.rank_memory", *options]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, list[float]] = json.loads(output.splitlines()[-1])
    return found


def compare_drafts(model: Path, draft: Path, ranks: int, dtype: str) -> None:
    """Write the peaks without a draft model, with a whole one on each rank, and with one that is split."""
    cases = {"none": (None, 1), "whole": (draft, 1), "split": (draft, ranks)}
    found = {}
    for name, (folder, draft_ranks) in cases.items():
        found[name] = peaks_of(model, folder, ranks, draft_ranks, dtype)
        print(name, found[name], flush=True)
    largest = {name: max(each["private"]) for name, each in found.items()}
    own = {name: round(largest[name] - largest["none"], 1) for name in ("whole", "split")}
    write("rank_memory_draft", {"ranks": ranks, "dtype": dtype, "mib": found, "private_mib_over_no_draft": own})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--one", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        ranks, draft_ranks = args.one
        measure(args.model, args.draft, ranks, draft_ranks, args.dtype)
        return
    if args.random:
        with tempfile.TemporaryDirectory() as folder:
            compare_drafts(*save_random(Path(folder)), args.ranks, args.dtype)
        return
    if args.model is None:
        parser.error("give --model or --random")
    if args.draft is not None:
        compare_drafts(args.model, args.draft, args.ranks, args.dtype)
        return
    found: dict[int, Any] = {}
    for ranks in (1, args.ranks):
        found[ranks] = peaks_of(args.model, None, ranks, 1, args.dtype)
        print(ranks, found[ranks], flush=True)
    ratios = {kind: round(max(found[args.ranks][kind]) / found[1][kind][0], 3) for kind in ("private", "resident")}
    write("rank_memory", {"dtype": args.dtype, "mib": found, "largest_rank_over_one_process": ratios})


if __name__ == "__main__":
    main()
