"""The base of drafters with a model: from a batch of rows to their trees, searched or drawn, level by level."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from specdec.draft_heads.drafting.draft_levels import DraftLevels
from specdec.draft_heads.drafting.drafter import Commit, DraftAhead, DraftRow, DraftsAhead, LoopAhead, Proposal
from specdec.draft_heads.drafting.level_loops import LevelLoops, State
from specdec.draft_heads.drafting.tree_draw import TreeDraw
from specdec.draft_heads.drafting.tree_search import Searched, TreeBounds, TreeSearch
from specdec.kernels.types.device_trees import DeviceTrees
from specdec.kernels.types.draft_trees import DraftTrees, HostTrees
from specdec.kernels.types.fused import DraftingRow, FusedDrafting
from specdec.kernels.types.types import TokenTargets, Walk
from specdec.kernels.types.upload import Packet
from specdec.verify.verifier import noise_key

if TYPE_CHECKING:
    # Importing it imports Triton, which an engine on plain torch does not need.
    from specdec.draft_heads.drafting.draft_graphs import LoopGraphs

# What a loop over levels returns.
Grown = TypeVar("Grown")


class TreeDrafter(LevelLoops[State]):
    """EAGLE-2's trees for a batch of rows: a subclass scores the children of a frontier; see `LevelLoops`."""

    @property
    def _stops_early(self) -> bool:
        """Return whether drafting ends at a level that is too rarely reached, `DraftShape.min_reach`."""
        return self.shape.min_reach > 0

    def propose(self, rows: Sequence[DraftRow], packet: Packet | None = None) -> DraftTrees:
        """Draft one tree per row; none after a single token where a head needs the feature before it."""
        rows = [self._free(row) for row in rows]
        ahead, self._ahead = self._ahead, None
        places = {} if ahead is None else ahead.places_of(rows)
        if places:
            drawn, _ = self._split([i for i, row in enumerate(rows) if row.drafts], rows)
            if any(i not in places for i in drawn):
                # Theirs would overwrite the probabilities that the others were drawn from.
                places = {i: place for i, place in places.items() if i not in drawn}
        first = self.first
        reading = [
            i
            for i, row in enumerate(rows)
            if row.draft_prefill_end > first and row.draft_prefill_end > row.num_draft_cached and i not in places
        ]
        if not reading and not places:
            return HostTrees.empty(len(rows))
        if self.one_call is not None and reading:
            given = self._one_call_rows([rows[i] for i in reading])
            if given is not None and self.one_call.takes(given):
                return self._draft_in_one_call(self.one_call, given, rows, reading)
        packet = Packet(self.kv.device) if packet is None else packet
        # The trees of all rows, group by group, with the row of each; of one form, `HostTrees` or `DeviceTrees`.
        found, order = list[Any](), list[int | None]()
        if ahead is not None and places:
            row_of = {place: i for i, place in places.items()}
            for loop in ahead.loops:
                own = [row_of.get(place) for place in loop.places]
                if any(row is not None for row in own):
                    order += own
                    found.append(self._trees_of(loop, [None if i is None else rows[i] for i in own], packet))
        if reading:
            draft = self._prepare(rows, reading, order, packet)
            packet.send()
            # Before other graphs run, whose memory the candidates share.
            found = [*map(_chosen, found), *draft()]
        if not found:
            return HostTrees.empty(len(rows))
        trees = found[0]
        for other in found[1:]:
            trees = trees.concat(other)
        if order != list(range(len(rows))):
            place_of = {row: k for k, row in enumerate(order) if row is not None}
            trees = trees.select([place_of.get(row) for row in range(len(rows))])
        drafted: DraftTrees = trees
        return drafted

    def _prepare(
        self, rows: Sequence[DraftRow], reading: Sequence[int], order: list[int | None], packet: Packet
    ) -> Callable[[], list[DraftTrees]]:
        """Return what reads, and drafts trees in groups, once the packet is sent; add the row of each tree to `order`.

        Args:
            reading: places of the rows whose tokens are to be read.
        """
        drafting = [i for i in reading if rows[i].num_nodes > 0 and rows[i].max_depth > 0]
        groups = [
            (own, drawn, self._graphs_for([rows[i] for i in own], drawn=drawn))
            for own, drawn in zip(self._split(drafting, rows), (True, False), strict=True)
            if own
        ]
        captured = {i for own, _, graphs in groups if graphs is not None for i in own}
        given, alone = [*rows], list[int]()
        for i in reading:
            row = rows[i]
            # A graph reads what a step may bring. More, as of a prompt, is read before, and the last token once more.
            if i not in captured or row.draft_prefill_end - max(row.num_draft_cached, self.first) > self.shape.tokens:
                alone.append(i)
                given[i] = row._replace(num_draft_cached=row.draft_prefill_end - 1)
        read = self._reading([rows[i] for i in alone], packet) if alone else None
        prepared = list[tuple[Tensor | None, Callable[[Tensor | None], DraftTrees]]]()
        for own, drawn, graphs in groups:
            is_all = graphs is not None or own == alone
            places = None if is_all else packet.add([alone.index(i) for i in own])
            prepare = self._draw if drawn else self._search
            prepared.append((places, prepare([given[i] for i in own], graphs, packet)))
            order += own

        def draft() -> list[DraftTrees]:
            roots = None if read is None else read()
            return [
                run(roots if places is None or roots is None else roots.index_select(0, places))
                for places, run in prepared
            ]

        return draft

    def _free(self, row: DraftRow) -> DraftRow:
        """Return a row without its grammar, where its tree is searched.

        Nodes that the grammar forbids are removed afterwards. That costs less than a mask at every level, for which the
        host would wait for a device, and which no call or graph of all levels has.
        """
        sampling = row.context.sampling
        if sampling.grammar is None or (self.proposal == Proposal.DRAWN and not sampling.is_greedy):
            return row
        return row._replace(context=row.context.without_grammar)

    def _split(self, places: Sequence[int], rows: Sequence[DraftRow]) -> tuple[list[int], list[int]]:
        """Return the places of rows whose trees are drawn, and of those whose trees are searched."""
        drawn = [k for k in places if self.proposal == Proposal.DRAWN and not rows[k].context.sampling.is_greedy]
        return drawn, [k for k in places if k not in drawn]

    def prepare_ahead(
        self, rows: Sequence[DraftRow], trees: DraftTrees, places: Sequence[int], packet: Packet
    ) -> tuple[list[int], DraftAhead] | None:
        """Prepare to draft the trees of the step after this one for some of its rows, behind its walk.

        All that depends on the number of accepted drafts is done on the device. The head reads as many tokens as a step
        may bring; what it writes behind those that it does bring is scratch.

        Args:
            rows: rows of the step whose trees have no nodes but this drafter's.
            trees: that are walked.
            places: places of the rows among the trees.
            packet: takes what the drafting needs.

        Returns:
            Which of the rows are drafted for, and what drafts for them once the packet is sent and the walk is made,
            for the next call of `propose`; None if there are none.
        """
        shape = self.shape
        if self.graphs is None or self._stops_early:
            return None
        last = self.llama.max_position - shape.tokens - shape.positions
        # Logit edits read tokens that the host does not know yet.
        able = [
            k
            for k, row in enumerate(rows)
            if row.is_followed and row.drafts and len(row.token_ids) <= last and not row.context.sampling.edits
        ]
        drawn_rows, searched_rows = self._split(able, rows)
        # Graphs of drawing are captured last, so they leave the candidates of a search as they are.
        groups = [
            (own, drawn, graphs)
            for own, drawn in ((searched_rows, False), (drawn_rows, True))
            if own and (graphs := self._graphs_for([rows[k] for k in own], drawn=drawn)) is not None
        ]
        kept = [k for own, _, _ in groups for k in own]
        if not kept:
            return None
        nodes, walked = trees.nodes(packet), [places[k] for k in kept]
        starts = list(accumulate(trees.sizes, initial=0))
        rows_of, firsts = packet.add_lists(walked, [starts[row] for row in walked])
        loops, start = list[tuple[slice, bool, tuple[Any, ...], Callable[[], Any]]](), 0
        for own, drawn, graphs in groups:
            chosen = [rows[k] for k in own]
            part, most = slice(start, start + len(own)), len(own) * shape.tokens
            coming = self._coming(chosen, graphs, packet)
            levels = self._levels(chosen, (), graphs, packet, drawn=drawn, ahead=shape.tokens)
            positions, noise = (each[: len(own)] for each in levels.own_positions)
            tokens, sources = coming.batch.tokens[:most].view(-1, shape.tokens), coming.batch.sources
            if sources is not None:
                sources = sources[:most].view(-1, shape.tokens)
            given = tokens, coming.accepted, sources, positions, noise
            loops.append((part, drawn, given, graphs.run_of(coming, levels, packet)))
            start = part.stop
        all_rows = [rows[k] for k in kept]

        def draft(walk: Walk, commit: Commit) -> DraftsAhead:
            commit(
                walk, [TokenTargets(nodes().tokens, rows_of[part], firsts[part], *given) for part, _, given, _ in loops]
            )
            grown = [LoopAhead(range(part.start, part.stop), drawn, run()) for part, drawn, _, run in loops]
            self._ahead = DraftsAhead(all_rows, grown)
            return self._ahead

        return kept, draft

    def _trees_of(self, loop: LoopAhead, rows: Sequence[DraftRow | None], packet: Packet) -> DeviceTrees:
        """Return trees that were drafted ahead.

        Args:
            rows: of the loop's places, those that take their trees.
            packet: takes the bounds of searched trees, whose nodes are chosen when they are first used.
        """
        budgets = [0 if row is None else row.num_nodes for row in rows]
        depths = [1 if row is None else min(self.shape.depth, row.max_depth) for row in rows]
        if loop.drawn:
            draw: TreeDraw = loop.grown
            return draw.device_trees(budgets, depths)
        bounds = self._bounds(budgets, depths, self.shape.depth, packet)
        searched: Searched = loop.grown
        return searched.trees(bounds, self.kernels.search, packet)

    def _one_call_rows(self, rows: Sequence[DraftRow]) -> list[DraftingRow] | None:
        """Return rows for drafting in one call, None where a row needs logit edits or drawn tokens."""
        given = list[DraftingRow]()
        for row in rows:
            sampling, start, end = row.context.sampling, max(row.num_draft_cached, self.first), row.draft_prefill_end
            depth = min(self.shape.depth, row.max_depth) if row.num_nodes > 0 else 0
            is_drawn = self.proposal == Proposal.DRAWN and not sampling.is_greedy
            if row.num_nodes > 0 and (sampling.edits or is_drawn):
                return None
            given.append(
                DraftingRow(
                    row.block_table,
                    row.token_ids[start:end],
                    start,
                    end,
                    max(row.draft_start, self.first),
                    row.num_nodes,
                    depth,
                    sampling.divisor,
                    sampling.limits if sampling.filters else None,
                    None if sampling.is_greedy or not depth else noise_key(row.context),
                    row.adapter,
                )
            )
        return given

    def _draft_in_one_call(
        self, one_call: FusedDrafting, given: list[DraftingRow], rows: Sequence[DraftRow], reading: list[int]
    ) -> DraftTrees:
        goes_on = all(rows[i].full_depth for i in reading if rows[i].num_nodes)
        found = one_call(given, 0.0 if goes_on else self.shape.min_reach)
        if len(reading) == len(rows):
            return found
        place = {row: k for k, row in enumerate(reading)}
        return found.select([place.get(row) for row in range(len(rows))])

    def _graphs_for(self, rows: Sequence[DraftRow], *, drawn: bool) -> "LoopGraphs[Any] | None":
        """Return the graphs if they can draft for these rows: no row needs more than a temperature and filters."""
        if self.graphs is None or (not drawn and self._ends_early(rows)):
            return None
        graphs: LoopGraphs[Any] = self.graphs.draw if drawn else self.graphs.search
        takes = graphs.has(len(rows), adapted=any(row.adapter for row in rows))
        return graphs if takes and not any(row.context.sampling.edits for row in rows) else None

    def _ends_early(self, rows: Sequence[DraftRow]) -> bool:
        return self._stops_early and not all(row.full_depth for row in rows)

    def _prepared(
        self,
        rows: Sequence[DraftRow],
        depths: Sequence[int],
        graphs: "LoopGraphs[Grown] | None",
        packet: Packet,
        *,
        drawn: bool,
    ) -> tuple[DraftLevels, Callable[[], Grown] | None]:
        """Return the inputs of the loop over levels, and the captured drafting of graphs; None where there are none."""
        if graphs is None:
            return self._levels(rows, depths, None, packet, drawn=drawn), None
        unread = self._unread(rows, graphs, packet)
        levels = self._levels(rows, depths, graphs, packet, drawn=drawn)
        return levels, graphs.run_of(unread, levels, packet)

    def _search(
        self, rows: Sequence[DraftRow], graphs: "LoopGraphs[Searched] | None", packet: Packet
    ) -> Callable[[Tensor | None], DraftTrees]:
        """Return what drafts trees of the most probable tokens, with the position's noise or without, of roots.

        Args:
            graphs: graphs that read as well, and need no roots; None where there are none.
        """
        depths = [min(self.shape.depth, row.max_depth) for row in rows]
        levels, run = self._prepared(rows, depths, graphs, packet, drawn=False)
        ends_early = self._ends_early(rows)
        if not self.kernels.on_device or ends_early:
            given = depths if ends_early else None
            return lambda roots: self._searched(self.search(levels, _known(roots), rows, given), rows, depths)
        bounds = self._bounds([row.num_nodes for row in rows], depths, levels.depth, packet)

        def draft(roots: Tensor | None) -> DraftTrees:
            found = self.search(levels, _known(roots), rows).candidates() if run is None else run()
            return _chosen(found.trees(bounds, self.kernels.search, packet))

        return draft

    def _bounds(self, budgets: Sequence[int], depths: Sequence[int], depth: int, packet: Packet) -> TreeBounds:
        """Return the bounds of trees by a search of `depth` levels."""
        return TreeBounds.of(budgets, depths, depth, self.branching, packet, self.shape.nodes)

    def _searched(self, search: TreeSearch, rows: Sequence[DraftRow], depths: Sequence[int]) -> DraftTrees:
        """Return the trees of a search on the host, or of one whose levels the host did not know beforehand."""
        budgets = [row.num_nodes for row in rows]
        if not self.kernels.on_device:
            return search.host_trees(budgets, depths)
        packet = Packet(self.kv.device)
        bounds = self._bounds(budgets, depths, search.num_levels, packet)
        return search.candidates().trees(bounds, self.kernels.search, packet)

    def _draw(
        self, rows: Sequence[DraftRow], graphs: "LoopGraphs[TreeDraw] | None", packet: Packet
    ) -> Callable[[Tensor | None], DraftTrees]:
        """Return what drafts trees of tokens drawn from q, of roots.

        How many are drawn is fixed beforehand, or q would not be their distribution.

        Args:
            graphs: see `_search`.
        """
        budgets, depths = [row.num_nodes for row in rows], [min(self.shape.depth, row.max_depth) for row in rows]
        levels, run = self._prepared(rows, depths, graphs, packet, drawn=True)

        def draft(roots: Tensor | None) -> DraftTrees:
            found = self.draw(levels, _known(roots), rows) if run is None else run()
            # On the device where the host need not know them yet.
            return found.device_trees(budgets, depths) if self.kernels.on_device else found.host_trees(budgets, depths)

        return draft


def _chosen(trees: DeviceTrees) -> DeviceTrees:
    """Return trees whose nodes are chosen now, before other graphs run, whose memory the candidates share."""
    _ = trees.batch.table
    return trees


def _known(roots: Tensor | None) -> Tensor:
    assert roots is not None, "the tokens were not read"
    return roots
