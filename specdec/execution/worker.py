"""The part of a step that runs on the model's device: draft, one forward pass, verify, commit."""

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specdec.cache.kv_cache import KVCache
from specdec.draft_heads.drafting.chained_trees import add_chains
from specdec.draft_heads.drafting.drafter import Commit, DraftAhead, Drafter, DraftRow
from specdec.draft_heads.drafting.structured_drafts import without_forbidden
from specdec.execution.device_clock import Mark, clock_of
from specdec.execution.model_runner import ModelRunner
from specdec.execution.step_order import StepOrder, StepOutcome
from specdec.kernels.types.draft_trees import DraftTrees, HostTrees, PreparedWalk, WalkOutcome
from specdec.kernels.types.tree import TreeRow
from specdec.kernels.types.types import Acceptance
from specdec.kernels.types.upload import Packet, upload
from specdec.verify.sampling import Context
from specdec.verify.tree_batch import slots_of
from specdec.verify.verifier import Verifier

if TYPE_CHECKING:
    from specdec.execution.cuda_graphs import CudaGraphs


class DraftedStep(NamedTuple):
    """A step whose trees are drafted.

    Attributes:
        late: rows whose tokens the drafter reads behind the pass.
        drafting: when drafting began and ended, and reading behind the pass where there was any.
        packet: takes what the step needs on the device; it may hold what the trees are made of.
    """

    order: StepOrder
    trees: DraftTrees
    late: list[DraftRow]
    drafting: list[tuple[Mark, Mark]]
    packet: Packet


class PassAhead(NamedTuple):
    """A pass over the tokens that a step brings, launched behind it.

    Attributes:
        rows: places of its rows by the identity of their requests' tokens.
        contexts: of these rows, which keeps the tokens alive.
        logits: `[rows, vocab_size]`.
    """

    rows: dict[int, int]
    contexts: list[Context]
    logits: Tensor

    def logits_of(self, contexts: Sequence[Context]) -> Tensor:
        """Return the logits of rows that have not ended."""
        places = [self.rows[id(context.token_ids)] for context in contexts]
        if places == list(range(len(self.rows))):
            return self.logits
        return self.logits.index_select(0, upload(places, self.logits.device))


class _Ahead(NamedTuple):
    """The drafting for the coming step, prepared: places of its rows among the sampled ones, and what runs it."""

    rows: list[int]
    draft: DraftAhead


class Verification(NamedTuple):
    """Prepared work that follows a step's pass.

    Attributes:
        walk: the acceptance rule of the sampled rows.
        commit: moves accepted cache entries, where a device does it; None if the host does.
        drafts: the drafting for the coming step; None if there is none.
        next_pass: launches the pass of the coming step; None if that is planned first.
    """

    walk: PreparedWalk
    commit: Commit | None
    drafts: _Ahead | None
    next_pass: Callable[[WalkOutcome], PassAhead] | None


class Worker:
    """Model, cache, drafter and verifier of one process. It is given rows and knows no requests.

    Args:
        graphs: what captures the CUDA graphs of passes and drafting; None where there are none.

    Attributes:
        device: device of the cache.
    """

    def __init__(
        self, runner: ModelRunner, drafter: Drafter, verifier: Verifier, graphs: "CudaGraphs | None" = None
    ) -> None:
        self.runner, self.drafter, self.verifier, self.graphs = runner, drafter, verifier, graphs
        self.device = runner.cache.target.device
        self._mark = clock_of(self.device)
        self._drafted: DraftedStep | None = None
        # Logits of the pass that is launched, and what follows them, None if no row is sampled.
        self._launched: tuple[Tensor, Verification | None] | None = None
        # When drafting ahead for the coming step began and ended.
        self._drafting: list[tuple[Mark, Mark]] = []
        # The pass that was launched behind the step before.
        self._next: PassAhead | None = None

    @property
    def cache(self) -> KVCache:
        return self.runner.cache

    def go_on_from(self, other: "Worker") -> None:
        """Take over the pass that another worker over the same cache has launched ahead. Drafts are drafted anew."""
        self._next = other._next

    def draft(self, order: StepOrder) -> DraftTrees:
        """Move blocks and draft; return the trees of the rows. The caller is in inference mode."""
        self.move_blocks(order)
        drafts, late = _split(order)
        before, self._drafting = self._drafting, []
        start = self._mark()
        packet = Packet(self.device)
        drafted = self.drafter.propose(drafts, packet)
        chained = add_chains(drafted, order.chains, self.device)
        trees = without_forbidden(chained, [row.context for row in order.drafts])
        self._drafted = DraftedStep(order, trees, late, [*before, (start, self._mark())], packet)
        return trees

    def move_blocks(self, order: StepOrder) -> None:
        """Make the block moves that precede a step."""
        self.cache.apply_moves(order.moves)
        order.moves.clear()

    def launch(self) -> None:
        """Launch the forward pass of the step that was drafted, and what the drafter reads behind it."""
        assert self._drafted is not None, "no step was drafted"
        order, trees, late, drafting, packet = self._drafted
        launched, self._next = self._next, None
        run = None if order.is_launched else self.runner.prepare(order.parts, trees, packet)
        verification = self.prepare_verification(order, trees, packet)
        packet.send()
        if run is not None:
            logits = run()
        else:
            assert launched is not None, "no pass was launched ahead"
            logits = launched.logits_of([row.context for row in order.drafts])
        self._launched = logits, verification
        if late:
            start = self._mark()
            self.drafter.propose(late)
            drafting.append((start, self._mark()))

    def finish(self) -> StepOutcome:
        """Verify the drafts of the launched step, and move accepted cache entries into place.

        A device then begins the coming step's work before the host reads the outcome.
        """
        assert self._drafted is not None, "no step was drafted"
        assert self._launched is not None, "no step was launched"
        (order, trees, _, drafting, _), (logits, verification) = self._drafted, self._launched
        self._drafted = self._launched = None
        acceptances = list[Acceptance]()
        if verification is not None:
            walk, commit, drafts, next_pass = verification
            outcome, ahead = walk(_sampled_logits(order, trees, logits)), None
            # The device goes on while the outcome is on its way, and while the host plans the coming step.
            if outcome.walk is not None and commit is not None:
                if drafts is None:
                    commit(outcome.walk, ())
                else:
                    start = self._mark()
                    ahead = drafts.draft(outcome.walk, commit)
                    self._drafting = [(start, self._mark())]
            if next_pass is not None:
                self._next = next_pass(outcome)
            acceptances = outcome.read()
            if commit is None or outcome.walk is None:
                self.move_accepted(order, acceptances)
            if drafts is not None and ahead is not None:
                ahead.learn([acceptances[row] for row in drafts.rows])
        whole = self.runner.model.whole(logits) if order.needs_logits else None
        return StepOutcome(trees.read(), acceptances, whole, drafting, {})

    def run_dummy_drafts(self, rows: Sequence[DraftRow]) -> None:
        """Draft trees that nothing reads, and wait for them. The caller is in inference mode."""
        self.drafter.propose(rows)
        self.runner.wait()

    def prepare_verification(self, order: StepOrder, trees: DraftTrees, packet: Packet) -> Verification | None:
        """Return what follows the pass of the sampled rows, None without such rows."""
        sampled = order.sampled
        if not sampled:
            return None
        own = trees if len(sampled) == len(order.parts) else trees.select(sampled)
        parts = [order.parts[row] for row in sampled]
        commit = drafts = None
        if any(own.sizes) and self.cache.kernels.on_device:
            commit = accepted_moves(self.cache, parts, own, packet)
            drafts = self._prepare_ahead(order, own, packet)
        walk = self.verifier.prepare(own, [order.drafts[row].context for row in sampled], packet)
        return Verification(walk, commit, drafts, self._prepare_next(order, packet) if order.followed else None)

    def _prepare_next(self, order: StepOrder, packet: Packet) -> Callable[[WalkOutcome], PassAhead]:
        """Return what launches the pass over the tokens that a step without drafts brings to some of its rows."""
        rows, contexts = order.followed, [order.drafts[row].context for row in order.followed]
        parts = [
            part._replace(tokens=[0], num_cached=part.num_cached + 1, num_scored=1)
            for part in (order.parts[row] for row in rows)
        ]
        run = self.runner.prepare(parts, HostTrees.empty(len(rows)), packet)
        chosen = None if len(rows) == len(order.sampled) else packet.add(rows)

        def launch(outcome: WalkOutcome) -> PassAhead:
            tokens = outcome.next_tokens
            if tokens is None:
                tokens = upload([token for _, token in outcome.read()], self.device)
            logits = run(tokens if chosen is None else tokens.index_select(0, chosen))
            return PassAhead({id(one.token_ids): place for place, one in enumerate(contexts)}, contexts, logits)

        return launch

    def _prepare_ahead(self, order: StepOrder, own: DraftTrees, packet: Packet) -> _Ahead | None:
        """Return what drafts the next trees of the rows that have trees in this step; None if none can be."""
        # Chains may be deeper than the head's trees.
        chains = order.chains
        places = [k for k, size in enumerate(own.sizes) if size and chains[order.sampled[k]] is None]
        rows = [order.drafts[order.sampled[place]] for place in places]
        found = self.drafter.prepare_ahead(rows, own, places, packet)
        if found is None:
            return None
        kept, draft = found
        return _Ahead([places[k] for k in kept], draft)

    def move_accepted(self, order: StepOrder, acceptances: Sequence[Acceptance]) -> None:
        """Move cache entries of accepted nodes that do not lie behind their chain yet to there."""
        source: list[int] = []
        target: list[int] = []
        for row, (path, _) in zip(order.sampled, acceptances, strict=True):
            if path != tuple(range(len(path))):
                part = order.parts[row]
                end = part.num_cached + len(part.tokens)
                slots = slots_of(part.block_table, end, end + path[-1] + 1, self.cache.block_size)
                source += [slots[node] for node in path]
                target += slots[: len(path)]
        if source:
            self.cache.move(source, target)


def accepted_moves(cache: KVCache, parts: Sequence[TreeRow], trees: DraftTrees, packet: Packet) -> Commit:
    """Return what moves a step's accepted entries behind their chains, before the host knows which they are.

    Args:
        parts: rows of the step that have the trees.
        packet: takes the slots of the nodes, which are there once it is sent.
    """
    width, unused = max(*trees.sizes, trees.depth), cache.null_block * cache.block_size
    slots = []
    for part, size in zip(parts, trees.sizes, strict=True):
        end = part.num_cached + len(part.tokens)
        slots.append([*slots_of(part.block_table, end, end + size, cache.block_size), *[unused] * (width - size)])
    # [rows, width]
    sent = packet.add(slots)
    return lambda walk, targets: cache.commit(walk, sent, targets)


def _split(order: StepOrder) -> tuple[list[DraftRow], list[DraftRow]]:
    """Return the rows as the drafter takes them before the pass, and those whose tokens it reads behind it.

    An entry of the drafter's cache needs the target's features of the token before, which the pass makes.
    """
    pairs = zip(order.drafts, order.parts, strict=True)
    late = [row for row, part in pairs if row.draft_prefill_end > part.num_cached + 1]
    if not late:
        return order.drafts, []
    waiting = {id(row) for row in late}
    return [row._replace(draft_prefill_end=0) if id(row) in waiting else row for row in order.drafts], late


def _sampled_logits(order: StepOrder, trees: DraftTrees, logits: Tensor) -> Tensor:
    """Return the logits of the sampled rows' roots and nodes."""
    # Told by the host's numbers: torch's code is not in the processor's caches behind a pass.
    sizes, scored = trees.sizes, sum(part.num_scored for part in order.parts)
    if scored == len(order.sampled) and sum(sizes) == sum(sizes[row] for row in order.sampled):
        return logits
    spans = score_spans(order, sizes)
    return torch.cat([logits[spans[row].stop - 1 - sizes[row] : spans[row].stop] for row in order.sampled])


def score_spans(order: StepOrder, sizes: Sequence[int]) -> list[slice]:
    """Return the slice of logits of each row: its scored tokens first, then the nodes of its tree.

    Args:
        sizes: nodes of each row's tree.
    """
    counts = [part.num_scored + size for part, size in zip(order.parts, sizes, strict=True)]
    return [slice(end - count, end) for end, count in zip(itertools.accumulate(counts), counts, strict=True)]
