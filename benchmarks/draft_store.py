"""The store of earlier texts alone: memory per token, cost of a token that is stored and of a search.

    python -m benchmarks.draft_store

Stores of each size are filled with texts of this repository's own files, pieces of them in drawn order with a tenth of
the tokens replaced, and then take as many rounds of new texts, which push out old ones. A request's output grows by
`--tau` tokens a step and is written as an engine writes it (`StoredText.follow`). Costs are processor time of this
process, whatever else the machine does; sizes take turns, and figures are medians of the rounds.
"""

import argparse
import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.report import RESULTS, finish, resident_mib
from specdec.config import DEMO
from specdec.draft_heads.drafting.stored_chains import DraftStore, StoredText
from specdec.kernels.native.text_store import NativeTextStore
from specdec.kernels.types.text_store import LONGEST
from specdec.models.tokenizer import Tokenizer

# Tokens of a text and of its prompt, and texts of a round.
LENGTH, PROMPT, TEXTS = 1024, 256, 40
SEARCHES = 2000
MOST, DEPTH = 3, 8


class NoChains:
    """Source without chains: n-grams of the request's own text are not measured here."""

    def chains(self, token_ids: Any, depth: int) -> list[Any]:  # noqa: ARG002
        return []


class Sample:
    """A store of a size, and what was measured of it."""

    def __init__(self, tokens: int, corpus: list[int]) -> None:
        before = resident_mib()
        self.texts = NativeTextStore(tokens)
        self.store, self.corpus, self.chance = DraftStore(self.texts, MOST), corpus, random.Random(tokens)
        for _ in range(0, tokens, LENGTH):
            self.store.open(("a",), NoChains()).follow(self.text(), 0, ended=True)
        self.taken = (resident_mib() - before) * 2**20
        self.stored, self.searched = list[float](), list[float]()

    def text(self) -> list[int]:
        """Return a text of pieces of the corpus, a tenth of whose tokens are others."""
        chance, found = self.chance, list[int]()
        while len(found) < LENGTH:
            start = chance.randrange(len(self.corpus) - 200)
            found += self.corpus[start : start + chance.randrange(20, 200)]
        return [chance.choice(self.corpus) if chance.random() < 0.1 else token for token in found[:LENGTH]]

    def round(self, tau: int) -> None:
        """Measure a round."""
        texts = [(self.store.open(("a",), NoChains()), self.text()) for _ in range(TEXTS)]
        for one, text in texts:
            one.follow(text[:PROMPT], 0, ended=False)
        self.stored.append(seconds(lambda: grow(texts, tau)) / (TEXTS * (LENGTH - PROMPT)))
        asked = [self.text()[:LONGEST] for _ in range(SEARCHES)]
        reader = self.store.open(("a",), NoChains())
        self.searched.append(seconds(lambda: [reader.chains(last, DEPTH) for last in asked]) / SEARCHES)


def grow(texts: list[tuple[StoredText, list[int]]], tau: int) -> None:
    for one, text in texts:
        known = text[:PROMPT]
        for end in range(PROMPT, LENGTH, tau):
            known += text[end : end + tau]
            one.follow(known, 0, ended=False)


def seconds(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--tau", type=int, default=2, help="tokens of an output a step")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    files = sorted((RESULTS.parents[1] / "specdec").glob("*/*.py"))
    tokenizer = Tokenizer(DEMO / "target")
    corpus = [token for file in files for token in tokenizer.encode(file.read_text(encoding="utf-8"))]
    samples = {tokens: Sample(tokens, corpus) for tokens in args.tokens}
    for _ in range(args.rounds):
        for sample in samples.values():
            sample.round(args.tau)
    rows = []
    for tokens, sample in samples.items():
        row = {
            "tokens": tokens,
            "bytes_per_token": round(sample.texts.num_bytes / tokens, 2),
            "memory_mb": round(sample.texts.num_bytes / 1e6, 1),
            "measured_mb": round(sample.taken / 1e6, 1),
            "us_per_token_stored": round(1e6 * median(sample.stored), 3),
            "us_per_search": round(1e6 * median(sample.searched), 2),
        }
        rows.append(row)
    settings = {"tau": args.tau, "rounds": args.rounds, "corpus_tokens": len(corpus), "most": MOST, "depth": DEPTH}
    finish("draft_store", settings, rows)


if __name__ == "__main__":
    main()
