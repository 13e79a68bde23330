"""The base of drafters with a model: from a batch of rows to their trees, searched or drawn, level by level."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from specdec.draft_heads.drafting.draft_levels import DraftLevels
from specdec.draft_heads.drafting.drafter import Commit, DraftAhead, DraftRow, Proposal
from specdec.draft_heads.drafting.drafts_ahead import DraftsAhead, LoopAhead, NewTokens, first_nodes
from specdec.draft_heads.drafting.level_loops import LevelLoops, State, step_keys
from specdec.draft_heads.drafting.one_call_rows import one_call_rows
from specdec.draft_heads.drafting.tree_draw import TreeDraw
from specdec.draft_heads.drafting.tree_search import Searched, TreeBounds, TreeSearch
from specdec.kernels.types.device_trees import DeviceTrees
from specdec.kernels.types.draft_trees import DraftTrees, HostTrees
from specdec.kernels.types.fused import DraftingRow, FusedDrafting
from specdec.kernels.types.types import TokenTargets, Walk
from specdec.kernels.types.upload import Packet
from specdec.verify.verifier import noise_keys

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
            given = one_call_rows([rows[i] for i in reading], self.shape.depth, self.first, self.proposal)
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
        read = self._reading([rows[i] for i in reading], packet) if reading else None
        if read is not None:
            packet.send()
            found = [_chosen(own) for own in found]
            # A device reads while the host prepares the levels.
            found += self._drafted(read(), rows, reading, order, packet)
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

    def _drafted(
        self,
        roots: Tensor,
        rows: Sequence[DraftRow],
        reading: Sequence[int],
        order: list[int | None],
        packet: Packet,
    ) -> list[DraftTrees]:
        """Draft the trees of rows that have been read, in groups; add the row of each tree to `order`.

        Args:
            roots: of `_reading`.
        """
        # Their places among the reading ones.
        drafting = [k for k, i in enumerate(reading) if rows[i].num_nodes > 0 and rows[i].max_depth > 0]
        groups = [
            (
                [reading[k] for k in chosen],
                None if len(chosen) == len(reading) else packet.add(chosen),
                prepare([rows[reading[k]] for k in chosen], packet),
            )
            for chosen, prepare in zip(
                self._split(drafting, [rows[i] for i in reading]), (self._draw, self._search), strict=True
            )
            if chosen
        ]
        packet.send()
        for places, _, _ in groups:
            order += places
        return [draft(roots if chosen is None else roots.index_select(0, chosen)) for _, chosen, draft in groups]

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
        graphs, shape = self.graphs, self.shape
        if graphs is None or self._stops_early:
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
        kinds: tuple[tuple[list[int], LoopGraphs[Any], bool], ...] = (
            (searched_rows, graphs.search, False),
            (drawn_rows, graphs.draw, True),
        )
        groups = [kind for kind in kinds if kind[0] and _graphs_for([rows[k] for k in kind[0]], kind[1])]
        kept = [k for own, _, _ in groups for k in own]
        if not kept:
            return None
        chosen = [rows[k] for k in kept]
        tokens, sources, read = self._reading_ahead(chosen, packet)
        nodes, walked = trees.nodes(packet), [places[k] for k in kept]
        rows_of, firsts = packet.add(walked), packet.add(first_nodes(trees, walked))
        loops, start = list[tuple[slice, bool, DraftLevels, Callable[[Tensor], Any]]](), 0
        for own, loop, drawn in groups:
            width, keys_of = (self.draw_sizes.width, step_keys) if drawn else (self.branching, noise_keys)
            levels = self._padded_levels([rows[k] for k in own], (), width, keys_of, loop, packet, shape.tokens)
            loops.append((slice(start, start + len(own)), drawn, levels, loop.loop_of(levels, packet)))
            start += len(own)

        def draft(walk: Walk, commit: Commit) -> DraftsAhead:
            new, targets = NewTokens(tokens, torch.empty_like(rows_of)), list[TokenTargets]()
            for part, _, levels, _ in loops:
                positions, noise = (each[: part.stop - part.start] for each in levels.own_positions)
                own = None if sources is None else sources[part]
                given = rows_of[part], firsts[part], tokens[part], new.accepted[part], own, positions, noise
                targets.append(TokenTargets(nodes().tokens, *given))
            commit(walk, targets)
            roots, grown = self._roots(read(), new), list[LoopAhead]()
            for part, drawn, _, run in loops:
                grown.append(LoopAhead(range(part.start, part.stop), drawn, run(roots[part])))
            self._ahead = DraftsAhead(chosen, grown)
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
            padding = draw.num_rows - len(rows)
            return draw.device_trees([*budgets, *[0] * padding], [*depths, *[1] * padding])
        bounds = TreeBounds.of(budgets, depths, self.shape.depth, self.branching, packet, self.shape.nodes)
        searched: Searched = loop.grown
        return searched.trees(bounds, self.kernels.search, packet)

    def _draft_in_one_call(
        self, one_call: FusedDrafting, given: list[DraftingRow], rows: Sequence[DraftRow], reading: list[int]
    ) -> DraftTrees:
        goes_on = all(rows[i].full_depth for i in reading if rows[i].num_nodes)
        found = one_call(given, 0.0 if goes_on else self.shape.min_reach)
        if len(reading) == len(rows):
            return found
        place = {row: k for k, row in enumerate(reading)}
        return found.select([place.get(row) for row in range(len(rows))])

    def _search(self, rows: Sequence[DraftRow], packet: Packet) -> Callable[[Tensor], DraftTrees]:
        """Return what drafts trees of the most probable tokens, with the position's noise or without, of roots."""
        depths = [min(self.shape.depth, row.max_depth) for row in rows]
        stops_early = self._stops_early and not all(row.full_depth for row in rows)
        graphs = None if stops_early or self.graphs is None else _graphs_for(rows, self.graphs.search)
        levels = self._padded_levels(rows, depths, self.branching, noise_keys, graphs, packet)
        if not self.kernels.on_device or stops_early:
            given = depths if stops_early else None
            return lambda roots: self._searched(self.search(levels, roots, rows, given), rows, depths)
        run = partial(self.candidates, levels, rows=rows) if graphs is None else graphs.loop_of(levels, packet)
        bounds = self._bounds(rows, depths, levels.depth, packet)
        return lambda roots: _chosen(run(roots).trees(bounds, self.kernels.search, packet))

    def _bounds(self, rows: Sequence[DraftRow], depths: Sequence[int], depth: int, packet: Packet) -> TreeBounds:
        """Return the bounds of rows' trees by a search of `depth` levels."""
        budgets = [row.num_nodes for row in rows]
        return TreeBounds.of(budgets, depths, depth, self.branching, packet, self.shape.nodes)

    def _searched(self, search: TreeSearch, rows: Sequence[DraftRow], depths: Sequence[int]) -> DraftTrees:
        """Return the trees of a search on the host, or of one whose levels the host did not know beforehand."""
        if not self.kernels.on_device:
            return search.host_trees([row.num_nodes for row in rows], depths)
        packet = Packet(self.kv.device)
        bounds = self._bounds(rows, depths, search.num_levels, packet)
        return search.candidates().trees(bounds, self.kernels.search, packet)

    def _draw(self, rows: Sequence[DraftRow], packet: Packet) -> Callable[[Tensor], DraftTrees]:
        """Return what drafts trees of tokens drawn from q, of roots.

        How many are drawn is fixed beforehand, or q would not be their distribution.
        """
        depths = [min(self.shape.depth, row.max_depth) for row in rows]
        graphs = None if self.graphs is None else _graphs_for(rows, self.graphs.draw)
        levels = self._padded_levels(rows, depths, self.draw_sizes.width, step_keys, graphs, packet)
        run = partial(self.draw, levels, rows=rows) if graphs is None else graphs.loop_of(levels, packet)
        return lambda roots: self._drawn(run(roots), rows, depths)

    def _drawn(self, draw: TreeDraw, rows: Sequence[DraftRow], depths: Sequence[int]) -> DraftTrees:
        """Return the trees of all rows but padding, on the device where the host need not know them yet."""
        bounds = _padded_bounds(rows, depths, draw.num_rows)
        trees = draw.device_trees(*bounds) if self.kernels.on_device else draw.host_trees(*bounds)
        return _without_padding(trees, len(rows))


def _chosen(trees: DeviceTrees) -> DeviceTrees:
    """Return trees whose nodes are chosen now, before other graphs run, whose memory the candidates share."""
    _ = trees.batch.table
    return trees


def _padded_bounds(rows: Sequence[DraftRow], depths: Sequence[int], count: int) -> tuple[list[int], list[int]]:
    """Return most nodes and levels of `count` rows, of which the last are padding."""
    padding = count - len(rows)
    return [*(row.num_nodes for row in rows), *[0] * padding], [*depths, *[1] * padding]


def _without_padding(trees: DraftTrees, count: int) -> DraftTrees:
    return trees.select(range(count)) if len(trees.sizes) > count else trees


def _graphs_for(rows: Sequence[DraftRow], graphs: "LoopGraphs[Grown]") -> "LoopGraphs[Grown] | None":
    """Return the graphs if they can draft for these rows: no row needs logit edits beyond temperature and filtering."""
    takes = graphs.has(len(rows), adapted=any(row.adapter for row in rows))
    return graphs if takes and not any(row.context.sampling.edits for row in rows) else None
