"""Peak memory of each rank of an engine, beside that of a single process.

python -m benchmarks.rank_memory --model FOLDER

Every engine runs in a process of its own, answers a few prompts, and then the peaks of its ranks are read from /proc:
`private` is memory of the process alone (RssAnon, sampled), `resident` also counts mapped files, such as libraries and
those pages of the checkpoint that the rank has read (VmHWM). `idle` is the private memory of a process that has loaded
nothing yet.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.report import write

PROMPT = list(range(10, 138))
MIB = 1024


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
                self.private[pid] = max(self.private.get(pid, 0.0), field(pid, "RssAnon"))
                self.resident[pid] = field(pid, "VmHWM")

    def stop(self) -> None:
        self._done.set()
        self.join()


def measure(model: Path, ranks: int, dtype: str) -> None:
    """Print the peaks of an engine's ranks, MiB."""
    peaks = Peaks()
    peaks.start()
    from specdec import LLM, SamplingParams

    idle = field("self", "RssAnon")
    llm = LLM(model, None, dtype=dtype, tensor_parallel_size=ranks, kv_cache_memory=1 << 26, prefill_stretch=0)
    llm.generate([PROMPT] * 4, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    time.sleep(0.1)
    peaks.stop()
    llm.close()
    sizes = {"idle": [idle], "private": list(peaks.private.values()), "resident": list(peaks.resident.values())}
    print(json.dumps({name: [round(value, 1) for value in values] for name, values in sizes.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        measure(args.model, args.one, args.dtype)
        return
    found: dict[int, Any] = {}
    for ranks in (1, args.ranks):
        options = ["--model", str(args.model), "--dtype", args.dtype, "--one", str(ranks)]
        output = subprocess.run(
            [sys.executable, "-m", "benchmarks.rank_memory", *options], check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        found[ranks] = json.loads(output.splitlines()[-1])
        print(ranks, found[ranks], flush=True)
    ratios = {kind: round(max(found[args.ranks][kind]) / found[1][kind][0], 3) for kind in ("private", "resident")}
    write("rank_memory", {"dtype": args.dtype, "mib": found, "largest_rank_over_one_process": ratios})


if __name__ == "__main__":
    main()
