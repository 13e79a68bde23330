"""Statistics of a running engine."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import NamedTuple

from specdec.core.lora_request import LoadedAdapter

# Fields of `EngineStats` that are not added up as they are.
_NO_NUMBERS = ("trees_by_accepted", "steps_by_tokens", "adapters", "sources", "outlook")


class DraftOutlook(NamedTuple):
    """Prediction for steps with the draft model's trees, where tree size adapts to load.

    Attributes:
        pays: whether they are predicted to be faster than plain ones, so that steps have them.
        cycle_cost: time of such a step over a plain one's, with the best tree size.
        tau: tokens that such a step yields per request.
    """

    pays: bool
    cycle_cost: float
    tau: float


@dataclass
class TreeCount:
    """Verified draft trees, and the tokens of outputs that their steps yielded."""

    trees: int = 0
    tokens: int = 0

    @property
    def tau(self) -> float:
        """Mean tokens per step with a tree: accepted drafts and the bonus token."""
        return self.tokens / self.trees if self.trees else 0.0


class SourceCount(NamedTuple):
    """Tokens that a draft source knew without a model, drafted or not, and those of them that became output."""

    tokens: int = 0
    right: int = 0


@dataclass
class AdapterTrees:
    """Draft trees of the requests with an adapter.

    Attributes:
        plain: trees that the draft model drafted without an adapter of its own, chains among them.
        adapted: those of the draft model with the adapter that was given for it.
    """

    plain: TreeCount = field(default_factory=TreeCount)
    adapted: TreeCount = field(default_factory=TreeCount)


@dataclass
class EngineStats:
    """Counts since the start, and the present state.

    Attributes:
        running, waiting, waiting_for_kv: numbers of requests; those whose blocks a connector fetches are waiting ones
            too.
        num_blocks: blocks of the cache.
        kv_usage: share of them that are held.
        steps: forward passes of the target.
        known_tokens: tokens of prompts and outputs that the target has computed.
        step_tokens: tokens of the last step, known ones and granted draft nodes.
        steps_by_tokens: steps by the number of their tokens.
        generated_tokens: tokens of outputs; of a beam search, those of the sequences that it found.
        passes_wasted: rows of passes that were launched ahead for requests that had ended.
        preemptions: how often a request lost its memory.
        prefix_queries: tokens of admitted requests, not counted again where one resumes after a preemption.
        prefix_hits: number of them found in the cache.
        external_prefix_queries: tokens of admitted requests that the cache lacked, with a connector; likewise.
        external_prefix_hits: number of them that the connector loaded.
        drafts_asked, drafts_granted: draft nodes of the largest trees in steps with drafts, and nodes that the
            scheduler granted.
        tree_tokens: tokens of outputs that steps with a draft tree yielded, each row's step by itself.
        drafts_verified: draft nodes that were verified.
        trees_by_accepted: verified draft trees by the number of their tokens that became output.
        adapters: trees of the requests with an adapter, by its name.
        sources: tokens of the draft sources that need no model, by their names.
        draft_seconds, verify_seconds: time of drafting, and of the steps without it, as far as steps are timed.
        queued, finished, aborted: numbers of requests added, ended by themselves, and ended from outside. Each beam of
            a search is a request, which finishes when its children replace it or the search has its result.
        outlook: whether drafts pay at the last load; None without a draft model, with fixed trees, or before a choice.
    """

    running: int = 0
    waiting: int = 0
    waiting_for_kv: int = 0
    num_blocks: int = 0
    kv_usage: float = 0.0
    steps: int = 0
    known_tokens: int = 0
    step_tokens: int = 0
    steps_by_tokens: dict[int, int] = field(default_factory=dict)
    generated_tokens: int = 0
    passes_wasted: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    external_prefix_queries: int = 0
    external_prefix_hits: int = 0
    drafts_asked: int = 0
    drafts_granted: int = 0
    tree_tokens: int = 0
    drafts_verified: int = 0
    trees_by_accepted: dict[int, int] = field(default_factory=dict)
    adapters: dict[str, AdapterTrees] = field(default_factory=dict)
    sources: dict[str, SourceCount] = field(default_factory=dict)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    queued: int = 0
    finished: int = 0
    aborted: int = 0
    outlook: DraftOutlook | None = None

    @staticmethod
    def total(parts: "Sequence[EngineStats]") -> "EngineStats":
        """Return the figures of several engines as those of one: counts are added, `kv_usage` is averaged.

        The outlook is that of the first engine that has one.
        """
        names = [each.name for each in fields(EngineStats) if each.name not in _NO_NUMBERS]
        total = EngineStats(**{name: sum(getattr(part, name) for part in parts) for name in names})
        total.kv_usage /= max(1, len(parts))
        total.trees_by_accepted = dict(sum((Counter(part.trees_by_accepted) for part in parts), Counter()))
        total.steps_by_tokens = dict(sum((Counter(part.steps_by_tokens) for part in parts), Counter()))
        for part in parts:
            for name, own in part.adapters.items():
                sums = total.adapters.setdefault(name, AdapterTrees())
                for count, more in ((sums.plain, own.plain), (sums.adapted, own.adapted)):
                    count.trees, count.tokens = count.trees + more.trees, count.tokens + more.tokens
            for name, (tokens, right) in part.sources.items():
                before = total.sources.get(name, SourceCount())
                total.sources[name] = SourceCount(before.tokens + tokens, before.right + right)
        total.outlook = next((part.outlook for part in parts if part.outlook is not None), None)
        return total

    def count_step(self, num_known: int, num_tokens: int) -> None:
        """Count a step of `num_tokens` tokens: `num_known` known ones, and draft nodes."""
        self.steps += 1
        self.known_tokens += num_known
        self.step_tokens = num_tokens
        self.steps_by_tokens[num_tokens] = self.steps_by_tokens.get(num_tokens, 0) + 1

    def count_tree(self, num_nodes: int, num_accepted: int, num_new: int, adapter: LoadedAdapter | None = None) -> None:
        """Count a verified draft tree, of which `num_accepted` tokens became output, `num_new` with the bonus token."""
        if adapter is not None:
            own = self.adapters.setdefault(adapter.request.lora_name, AdapterTrees())
            count = own.adapted if adapter.draft_place else own.plain
            count.trees, count.tokens = count.trees + 1, count.tokens + num_new
        self.tree_tokens += num_new
        self.drafts_verified += num_nodes
        self.trees_by_accepted[num_accepted] = self.trees_by_accepted.get(num_accepted, 0) + 1

    @property
    def trees_verified(self) -> int:
        """Number of draft trees that were verified."""
        return sum(self.trees_by_accepted.values())

    @property
    def drafts_accepted(self) -> int:
        """Number of draft nodes that became output."""
        return sum(accepted * trees for accepted, trees in self.trees_by_accepted.items())

    @property
    def accepted_per_depth(self) -> list[int]:
        """Trees of which the draft token at depth 1, 2, ... became output."""
        deepest = max(self.trees_by_accepted, default=0)
        return list(accumulate(self.trees_by_accepted.get(depth, 0) for depth in range(deepest, 0, -1)))[::-1]
