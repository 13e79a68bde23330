"""Where a head loses tau, by kind of text: acceptance, accuracy by depth, and what its draft vocabulary leaves out.

    python -m benchmarks.lost_tau --model TARGET --draft HEAD [HEAD ...] --data NAME=FOLDER [NAME=FOLDER ...]

Each FOLDER is what `specdec prepare` wrote of the target's own answers at temperature 0 (`specdec regenerate`), such as
the answers to one kind of question, or conversations that the head was trained on beside others. Of each conversation
the first answer counts. For each head and kind:

- tau at 8 and 60 nodes, by replaying the answers (`train_eagle/evaluation/replay.py`): the target computes no tree.
- covered: share of the answers' tokens that the head can propose.
- own: share of the tokens at depth 1, 2, … that are the head's likeliest, behind right drafts, from its own states.
- target's: the same tokens predicted from the target's states of the token before: what exposure to its own states
  costs the head.
- top 8: the tokens of `own` among the 8 likeliest: what a wider tree could accept.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.report import write
from specdec import LLM, DraftShape
from specdec.config import EAGLE2_SHAPE
from specdec.core.outputs import SpeculationStats
from specdec.draft_heads.heads.draft_head import DraftModel, HeadForm
from specdec.draft_heads.heads.readout import MatrixReadout
from specdec.kernels.kernel_set import torch_kernels
from specdec.train_eagle.data.chat_mask import Sample
from specdec.train_eagle.data.prepared_data import PreparedData
from specdec.train_eagle.evaluate import named_sources
from specdec.train_eagle.evaluation.accuracy import NO_TOKEN, head_of, token_ranks
from specdec.train_eagle.evaluation.evaluation import format_shares
from specdec.train_eagle.evaluation.replay import KnownAnswer, replay
from specdec.train_eagle.passes.features import FeatureBatch, OnlineFeatures

SHAPES = (DraftShape(6, 8, 8), EAGLE2_SHAPE)
WIDE = 8


def first_answer(sample: Sample) -> Sample:
    """Return a conversation up to the end of its first answer."""
    start = sample.mask.index(True)
    end = next((i for i in range(start, len(sample.mask)) if not sample.mask[i]), len(sample.mask))
    return Sample(sample.token_ids[:end], sample.mask[:end])


def measure(head: HeadForm, readout: MatrixReadout, batches: Sequence[FeatureBatch]) -> dict[str, Any]:
    """Return the figures of a head on conversations of one kind."""
    kernels, depth = torch_kernels(torch.device("cpu")), EAGLE2_SHAPE.depth
    answers = [KnownAnswer(batch, int(batch.mask.nonzero()[0])) for batch in batches]
    totals = [SpeculationStats.total(replay(DraftModel(head, readout), answers, one, kernels)) for one in SHAPES]
    # The target's state of the token before depth k's is that of a root k - 1 tokens later.
    ranks = [token_ranks(head, readout, _drafted(batch), depth) for batch in batches]
    own = torch.cat(ranks, 1)
    targets = torch.cat([_later(each) for each in ranks], 1)
    tokens = torch.cat([batch.tokens[batch.mask] for batch in batches])
    covered = 1.0 if readout.tokens is None else torch.isin(tokens, readout.tokens).float().mean().item()
    return {
        "answers": len(batches),
        "tokens": len(tokens),
        "tau": {one.in_words: round(total.tau, 4) for one, total in zip(SHAPES, totals, strict=True)},
        "accepted_per_depth": [round(count / totals[0].steps, 4) for count in totals[0].accepted_per_depth],
        "covered": round(covered, 4),
        "own": _shares(own, own != NO_TOKEN, 1),
        "target's": _shares(targets, own != NO_TOKEN, 1),
        f"top {WIDE}": _shares(own, own != NO_TOKEN, WIDE),
    }


def _drafted(batch: FeatureBatch) -> FeatureBatch:
    """Return the batch with the tokens marked that are drafted: all of an answer but its first."""
    mask = batch.mask.clone()
    mask[mask.nonzero()[0]] = False
    return FeatureBatch(batch.lengths, batch.tokens, mask, batch.features, batch.taps)


def _later(ranks: Tensor) -> Tensor:
    """Return the ranks at depth 1 of the tokens that lie at each depth, `[depth, roots]`."""
    found = torch.full_like(ranks, NO_TOKEN)
    for step in range(len(ranks)):
        found[step, : ranks.shape[1] - step] = ranks[0, step:]
    return found


def _shares(ranks: Tensor, counted: Tensor, top: int) -> list[float]:
    inside = (ranks >= 0) & (ranks < top) & counted
    return [round(share, 4) for share in (inside.sum(1) / counted.sum(1).clamp_min(1)).tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="target folder")
    parser.add_argument("--draft", required=True, nargs="+", help="folders of heads")
    parser.add_argument("--data", required=True, nargs="+", metavar="NAME=FOLDER", help="prepared answers by kind")
    parser.add_argument("--limit", type=int, default=8, help="most answers of a kind; default: %(default)s")
    parser.add_argument("--name", default="lost_tau", help="of the JSON file under benchmarks/results/")
    args = parser.parse_args()
    samples = {
        name: [first_answer(sample) for sample in PreparedData(Path(folder)).load()[: args.limit]]
        for name, folder in named_sources(args.data).items()
    }
    heads: dict[str, Any] = {}
    for draft in args.draft:
        # Ranks take the head's layers part by part, which kernels of one call are not.
        llm = LLM(args.model, draft, kernels="torch")
        head, readout = head_of(llm)
        found = {}
        for name, texts in samples.items():
            source = OnlineFeatures(llm.model, texts, head.taps)
            found[name] = measure(head, readout, [source.batch([i]) for i in range(len(texts))])
            print(draft, name, found[name], flush=True)
        heads[Path(draft).name] = found
    columns = ("head", "text", "tau", "covered", "own", "target's", f"top {WIDE}")
    table = Table(*columns)
    for draft, found in heads.items():
        for name, row in found.items():
            taus = " ".join(f"{tau:.2f}" for tau in row["tau"].values())
            shares = (format_shares(row[column]) for column in columns[4:])
            table.add_row(draft, name, taus, f"{row['covered']:.3f}", *shares)
    Console().print(table)
    write(args.name, {"model": Path(args.model).name, "trees": [one.in_words for one in SHAPES], "heads": heads})


if __name__ == "__main__":
    main()
