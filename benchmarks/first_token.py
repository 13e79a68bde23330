"""Time to a prompt's first token by its length, and the share of the processor's speed that the pass reaches.

    python -m benchmarks.first_token MODEL --name NAME [--before TREE]

Two speeds to compare with, on the same threads in bfloat16: torch's product of two large matrices, and, where the
processor has tile registers and a compiler is at hand, products of registers alone (`tile_peak.c`). Operations are
those of the layers' products, of attention up to each token, and of one row of logits. With `--before`, another tree
of this repository takes turns with this one. Each engine is a process of its own.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

TOKENS = (64, 256, 512, 1024)
REPEATED, WARM_UPS, SIDE = 12, 2, 2048


def seconds_of(model: str, dtype: str) -> list[float]:
    """Return the median seconds until the first token of each prompt's length."""
    from specdec import LLM, SamplingParams

    llm = LLM(model, None, dtype=dtype, enable_prefix_caching=False)
    params, found = SamplingParams(temperature=0, max_tokens=1), list[float]()
    for tokens in TOKENS:
        seconds = []
        for each in range(WARM_UPS + REPEATED):
            prompt = [3 + (7 * place + each) % 250 for place in range(tokens)]
            start = time.perf_counter()
            llm.generate(prompt, params)
            seconds.append(time.perf_counter() - start)
        found.append(median(seconds[WARM_UPS:]))
    return found


def operations(model: str) -> list[float]:
    """Return the operations of a pass over a prompt of each length."""
    from specdec.draft_heads.llama.checkpoint_files import read_config
    from specdec.draft_heads.llama.llama_config import LlamaConfig

    config = LlamaConfig.from_json(read_config(Path(model)))
    heads, hidden = config.num_heads * config.head_dim, config.hidden_size
    both = 2 * config.num_kv_heads * config.head_dim
    layer = hidden * (2 * heads + both + 3 * config.intermediate_size)
    return [
        2 * hidden * config.vocab_size
        + config.num_layers * (2 * layer * tokens + 4 * heads * tokens * (tokens + 1) // 2)
        for tokens in TOKENS
    ]


def product_speed() -> float:
    """Return the operations a second of torch's product of two matrices in bfloat16."""
    one, other = (torch.randn(SIDE, SIDE).bfloat16() for _ in range(2))
    seconds = []
    for _ in range(REPEATED):
        start = time.perf_counter()
        one @ other
        seconds.append(time.perf_counter() - start)
    return 2 * SIDE**3 / median(seconds)


def tile_speed() -> float | None:
    """Return the operations a second of tile registers; None where they cannot be measured."""
    source, compiler = Path(__file__).with_name("tile_peak.c"), shutil.which("gcc")
    if compiler is None or "amx_bf16" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        return None
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/tile_peak"
        subprocess.run(
            [compiler, "-O2", "-mamx-tile", "-mamx-bf16", str(source), "-o", program, "-lpthread"], check=True
        )
        made = subprocess.run([program, str(torch.get_num_threads())], check=True, capture_output=True, text=True)
    return 1e12 * float(made.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a checkpoint, from the root")
    parser.add_argument("--name", required=True, help="of the model, in the result's name")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--before", type=Path, help="a tree of this repository, with its library built")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cell", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        print(*seconds_of(args.model, args.dtype))
        return
    from benchmarks.report import finish, in_turns

    found = in_turns(__file__, [*sys.argv[1:], "--cell"], args.before, args.rounds)
    speeds = {"product": product_speed(), "tiles": tile_speed()}
    rows = []
    for place, (tokens, needed) in enumerate(zip(TOKENS, operations(args.model), strict=True)):
        seconds = {name: median(own[place] for own in rounds) for name, rounds in found.items()}
        row = {"tokens": tokens, **{f"{name}_ms": round(1e3 * own, 2) for name, own in seconds.items()}}
        for name, speed in speeds.items():
            if speed is not None:
                row[f"of_{name}"] = round(needed / seconds["now"] / speed, 3)
        rows.append(row)
    known = {f"{name}_speed": speed and round(speed * 1e-12, 3) for name, speed in speeds.items()}
    finish(f"first_token_{args.name}", {"dtype": args.dtype, "rounds": args.rounds, **known}, rows)


if __name__ == "__main__":
    main()
