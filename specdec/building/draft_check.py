"""A check at start: whether the draft model's first drafts are the target's own tokens more often than by chance."""

import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from specdec.draft_heads.drafting.drafter import DraftRow
from specdec.execution.executor import Executor
from specdec.execution.step_order import StepOrder
from specdec.kernels.types.integers import ceil_div
from specdec.kernels.types.tree import TreeRow
from specdec.verify.sampling import Context, Sampling

logger = logging.getLogger(__name__)
# Steps with a draft, of a row for each prompt. With four prompts, a head of which every fifth draft is right is told of
# in one start of a hundred, one of which every third is right in one of thirty thousand.
STEPS = 8
# Most tokens of a prompt that are read, its last ones.
PROMPT = 64
# Share of right drafts up to which there is nothing to gain, however rare the tokens are.
LEAST = 0.05
# Share of right drafts by chance from which the texts repeat themselves, and tell nothing.
MOST_CHANCE = 0.25


class FirstDrafts(NamedTuple):
    """First draft tokens of some steps, and the target's tokens in their places."""

    drafted: list[int]
    wanted: list[int]

    @property
    def hits(self) -> int:
        return sum(one == other for one, other in zip(self.drafted, self.wanted, strict=True))

    @property
    def chance(self) -> float:
        """Expected share of hits if the same drafts were in any order."""
        drafted, wanted = Counter(self.drafted), Counter(self.wanted)
        return sum(count * wanted[token] for token, count in drafted.items()) / max(1, len(self.wanted)) ** 2

    @property
    def are_no_better_than_chance(self) -> bool:
        """True where hits lie within two standard deviations of chance."""
        num, chance = len(self.wanted), self.chance
        if not num or chance > MOST_CHANCE:
            return False
        return self.hits <= num * max(LEAST, chance + 2 * math.sqrt(chance * (1 - chance) / num))


def check_first_drafts(executor: Executor, prompts: Sequence[Sequence[int]], context: int, slots: int) -> None:
    """Warn of a draft model whose first drafts are right no more often than by chance.

    All ranks call it, while the cache holds nothing. It takes a pass over the prompts and `STEPS` steps with drafts.

    Args:
        prompts: token ids.
        context, slots: see `DraftSizes`.
    """
    start = time.perf_counter()
    with executor.ranks.together():
        found = first_drafts(executor, executor.ranks.decide(lambda: prompts), context, slots)
    if executor.ranks.rank or not found.wanted:
        return
    num, seconds = len(found.wanted), time.perf_counter() - start
    logger.info("first drafts: %d of %d are the target's tokens, tried in %.2f s", found.hits, num, seconds)
    if found.are_no_better_than_chance:
        logger.warning(
            "the draft model drafts no better than chance: %d of its %d first drafts are the target's tokens. Was it "
            "trained for another target, or for one whose weights were not quantised like these? Does it read the "
            "layers that it was trained on (specdec inspect shows them)?",
            *(found.hits, num),
        )


@torch.inference_mode()
def first_drafts(executor: Executor, prompts: Sequence[Sequence[int]], context: int, slots: int) -> FirstDrafts:
    """Continue prompts greedily with one draft a step; none where the cache or the context is too small for it.

    The cache is left as it was; nothing of it is published, and no time of these steps is kept.
    """
    cache, found = executor.worker.cache, FirstDrafts([], [])
    room = min(PROMPT, context - 2 * (1 + STEPS))
    each = ceil_div(room + 2 * (1 + STEPS) + slots, cache.block_size)
    texts = [list(prompt[-room:]) for prompt in prompts[: cache.num_blocks // each]] if room > 0 else []
    if not texts:
        return found
    lengths, first = [len(text) for text in texts], cache.num_blocks - each * len(texts)
    tables = [list(range(first + each * row, first + each * (row + 1))) for row in range(len(texts))]
    before = {name: part[first : cache.num_blocks].clone() for name, part in cache.parts.items()}
    cached, read = [0] * len(texts), [0] * len(texts)
    for step in range(1 + STEPS):
        # The first step reads the prompts.
        nodes, ends = min(1, step), [len(text) if step else 0 for text in texts]
        parts = [TreeRow(text[n:], n, table, 1) for text, n, table in zip(texts, cached, tables, strict=True)]
        drafts = [
            DraftRow(table, done, end, nodes, nodes, Context(Sampling(), text, length), full_depth=True)
            for table, done, end, text, length in zip(tables, read, ends, texts, lengths, strict=True)
        ]
        executor.step(StepOrder(parts, drafts, [None] * len(texts), list(range(len(texts))), [], needs_logits=False))
        outcome = executor.collect()
        executor.tell_outcome(outcome)
        accepted = outcome.acceptances
        if any(token < 0 for _, token in accepted):
            # Logits are not finite; requests will be told.
            break
        # The entries of accepted nodes lie behind their chain.
        cached = [len(text) + len(path) for text, (path, _) in zip(texts, accepted, strict=True)]
        read = ends
        for text, tree, (path, token) in zip(texts, outcome.trees, accepted, strict=True):
            new = [*(tree.tokens[node] for node in path), token]
            if tree.tokens:
                found.drafted.append(tree.tokens[0])
                found.wanted.append(new[0])
            text += new
    for name, part in cache.parts.items():
        part[first : cache.num_blocks] = before[name]
    return found
