"""Cheap draft logits: which of a head's ten most probable tokens are scored, time per call, and the remaining tau.

    python -m benchmarks.candidate_recall

The states are those that the demo head reads out while drafting. `draft_vocab` scores only the first tokens;
`draft_rank` preselects candidates by a low-rank product and scores only those exactly. The demo's matrix is so small
that scoring all of it costs next to nothing, so calls are also timed with a random matrix of a Llama's size.
"""

import argparse
import time
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.acceptance import PROMPT_TOKENS, SEATS, measure
from benchmarks.report import parse_shape, read_prompts, write
from specdec import LLM, SamplingParams
from specdec.core.device import DTYPES
from specdec.draft_heads.drafting.model_drafter import ModelDrafter
from specdec.draft_heads.heads.readout import CandidateReadout, MatrixReadout, Readout, trimmed_readout
from specdec.kernels.reference.projection import Projection
from specdec.kernels.types.types import Candidates

BEST = 10
READOUTS: dict[str, dict[str, int]] = {
    "all tokens": {},
    **{f"draft_vocab {tokens}": {"draft_vocab": tokens} for tokens in (2048, 1024, 512)},
    **{f"draft_rank {rank}": {"draft_rank": rank} for rank in (256, 128, 64, 32, 16)},
}

LARGE_VOCAB, LARGE_RANKS = 32768, (256, 64)


class Recorder:
    """A readout, and the states that it was called with."""

    def __init__(self, readout: Readout) -> None:
        self.readout = readout
        self.states: list[Tensor] = []

    @property
    def size(self) -> int:
        return self.readout.size

    def __call__(self, hidden: Tensor) -> Candidates:
        self.states.append(hidden.clone())
        return self.readout(hidden)


def readout_of(llm: LLM) -> Readout:
    assert isinstance(llm.engine.worker.drafter, ModelDrafter)
    return llm.engine.worker.drafter.readout


def states_of(llm: LLM, names: list[str], max_tokens: int) -> Tensor:
    """`[states, hidden_size]`, of all roots and expanded nodes of some answers."""
    drafter = llm.engine.worker.drafter
    assert isinstance(drafter, ModelDrafter)
    drafter.readout = recorder = Recorder(drafter.readout)
    prompts = [llm.chat_prompt(messages) for name in names for messages in read_prompts(name)[:20]]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens))
    return torch.cat(recorder.states)


def recall(readout: Readout, states: Tensor, likeliest: Tensor) -> float:
    """Mean share of the ten likeliest of all tokens that it scores; `likeliest` is `[states, 10]`."""
    shares = []
    for part, best in zip(states.split(1000), likeliest.split(1000), strict=True):  # type: ignore[no-untyped-call]
        scored = readout(part).full().isfinite()
        shares.append(scored.gather(1, best).float().mean(1))
    return torch.cat(shares).mean().item()


def milliseconds(readouts: dict[str, Readout], states: Tensor, rows: int, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of a call with `rows` rows, per readout; the readouts take turns."""
    times: dict[str, list[float]] = {name: [] for name in readouts}
    for number in range(rounds):
        part = states[number * rows % (len(states) - rows) :][:rows]
        for name, readout in readouts.items():
            start = time.perf_counter()
            readout(part)
            times[name].append(time.perf_counter() - start)
    return {name: round(1000 * median(taken), 4) for name, taken in times.items()}


def of_a_llama(size: tuple[int, int], dtype: torch.dtype) -> tuple[dict[str, Readout], Tensor]:
    """Readouts of a random matrix of this size, and states for them."""
    vocab, width = size
    generator = torch.Generator().manual_seed(0)
    whole = MatrixReadout(Projection(torch.randn(vocab, width, generator=generator).to(dtype)), vocab)
    readouts: dict[str, Readout] = {
        "all tokens": whole,
        f"draft_vocab {LARGE_VOCAB}": trimmed_readout(whole, min(vocab, LARGE_VOCAB)),
    }
    for rank in LARGE_RANKS:
        start = time.perf_counter()
        readouts[f"draft_rank {rank}"] = CandidateReadout(whole, min(rank, width))
        print(f"rank {rank} of {vocab} x {width} made in {time.perf_counter() - start:.1f} s", flush=True)
    return readouts, torch.randn(512, width, generator=generator).to(dtype)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--shape", default="6,10,60", help="depth,branching,nodes")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 10, 80], help="of the calls that are timed")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument(
        "--large", type=int, nargs=2, default=[128256, 2048], help="rows and columns of a Llama's matrix"
    )
    args = parser.parse_args()
    names = ["sgd-eval", "gsm8k-eval"]

    def load(**settings: int) -> LLM:
        shape = parse_shape(args.shape)
        # Room for every row's whole tree, also beside prompts.
        sizes = {"max_num_seqs": SEATS, "max_num_batched_tokens": SEATS * (1 + shape.nodes) + PROMPT_TOKENS}
        fixed = {"draft": "eagle", "dtype": args.dtype, "shape": shape, "adaptive_drafts": False}
        return LLM(**fixed, **sizes, **settings)  # type: ignore[arg-type]

    llms = {name: load(**settings) for name, settings in READOUTS.items()}
    readouts = {name: readout_of(llm) for name, llm in llms.items()}
    whole = llms["all tokens"]
    # By an engine of its own: others begin with an empty cache.
    states = states_of(load(), names, args.max_tokens)
    likeliest = readouts["all tokens"](states).full().topk(BEST).indices
    large_readouts, large_states = of_a_llama(args.large, DTYPES[whole.config.dtype])
    large_rounds = max(10, args.rounds // 10)
    large = {rows: milliseconds(large_readouts, large_states, rows, large_rounds) for rows in args.rows}
    del large_readouts
    taken = {rows: milliseconds(readouts, states, rows, args.rounds) for rows in args.rows}
    rows: list[dict[str, Any]] = []
    for name, llm in llms.items():
        taus = [
            measure(llm, prompts, temperature, args.max_tokens)
            for prompts in names
            for temperature in args.temperatures
        ]
        rows.append(
            {
                "readout": name,
                "tokens_scored": readouts[name].size,
                "recall_of_ten": round(recall(readouts[name], states, likeliest), 4),
                "milliseconds": {str(count): taken[count][name] for count in args.rows},
                "tau": {f"{one['prompts']}, temperature {one['temperature']:g}": one["tau"] for one in taus},
            }
        )
        print(rows[-1], flush=True)
    columns = [f"ms, {count} rows" for count in args.rows]
    table = Table("readout", "scored", "recall of 10", *columns, *(f"tau, {name}" for name in rows[0]["tau"]))
    for row in rows:
        figures = [*row["milliseconds"].values(), *row["tau"].values()]
        table.add_row(row["readout"], str(row["tokens_scored"]), f"{row['recall_of_ten']:.3f}", *map(str, figures))
    Console().print(table)
    large_table = Table(f"readout of {' x '.join(map(str, args.large))}", *columns)
    for name in large[args.rows[0]]:
        large_table.add_row(name, *(str(large[count][name]) for count in args.rows))
    Console().print(large_table)
    large_figures = {"size": args.large, "milliseconds": {str(count): large[count] for count in args.rows}}
    common = {"dtype": whole.config.dtype, "shape": args.shape, "max_tokens": args.max_tokens}
    sizes = {"vocab_size": whole.model.config.vocab_size, "hidden_size": whole.model.config.hidden_size}
    write(
        "candidate_recall",
        {**common, **sizes, "states": len(states), "rows": rows, "large": large_figures},
    )


if __name__ == "__main__":
    main()
