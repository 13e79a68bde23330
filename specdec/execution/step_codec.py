"""Orders of steps on their way to other processes: of a request's tokens only the new ones are sent."""

from array import array
from dataclasses import replace
from typing import NamedTuple

from specdec.cache.block_moves import BlockMove
from specdec.draft_heads.drafting.chains import ChainNodes
from specdec.draft_heads.drafting.drafter import DraftRow
from specdec.execution.grammar_codec import GrammarReader, GrammarWriter, SentGrammar
from specdec.execution.step_order import StepOrder
from specdec.kernels.types.tree import TreeRow
from specdec.verify.sampling import Context, Sampling


class SentContext(NamedTuple):
    """A request that the reader does not know.

    Attributes:
        sampling: without its grammar.
        num_prompt: tokens of its prompt.
    """

    sampling: Sampling
    num_prompt: int
    grammar: SentGrammar | None


class SentRow(NamedTuple):
    """A row of a `StepOrder`.

    Attributes:
        number: the request's, among those of this writer.
        context: the request; None if the order before had it.
        tokens: known tokens that the order before did not have.
        part: num_cached, number of known tokens of the row, and num_scored.
        table: block table.
        draft: num_draft_cached, draft_prefill_end, num_nodes, max_depth and draft_start.
        adapters: of the target and of the draft model.
        padding: blocks that the draft's table has beyond the other.
        chain: draft nodes that need no model.
    """

    number: int
    context: SentContext | None
    tokens: list[int]
    part: tuple[int, int, int]
    table: "array[int]"
    draft: tuple[int, int, int, int, int]
    adapters: tuple[int, int]
    padding: "array[int]"
    chain: ChainNodes | None


class SentOrder(NamedTuple):
    """A `StepOrder`; see there."""

    rows: list[SentRow]
    sampled: list[int]
    moves: list[BlockMove]
    needs_logits: bool


class OrderWriter:
    """Writes orders for readers that get all of them. Tokens of a request only ever grow."""

    def __init__(self) -> None:
        # The requests of the order before: number, context, and tokens sent. Held contexts keep their ids.
        self._sent: dict[int, tuple[int, Context, int]] = {}
        self._next = 0
        self._grammars = GrammarWriter()

    def write(self, order: StepOrder) -> SentOrder:
        """Return the order as it is sent."""
        before, self._sent = self._sent, {}
        rows = []
        for part, draft, chain in zip(order.parts, order.drafts, order.chains, strict=True):
            context = draft.context
            known = before.get(id(context))
            if known is None:
                number, sent, new = self._next, 0, self._new(context)
                self._next += 1
            else:
                (number, _, sent), new = known, None
            self._sent[id(context)] = number, context, len(context.token_ids)
            rows.append(
                SentRow(
                    number,
                    new,
                    list(context.token_ids[sent:]),
                    (part.num_cached, len(part.tokens), part.num_scored),
                    array("q", part.block_table),
                    (*draft[1:5], draft.draft_start),
                    (part.adapter, draft.adapter),
                    array("q", draft.block_table[len(part.block_table) :]),
                    chain,
                )
            )
        return SentOrder(rows, order.sampled, list(order.moves), order.needs_logits)

    def _new(self, context: Context) -> SentContext:
        sampling, grammar = context.sampling, context.sampling.grammar
        sent = None if grammar is None else self._grammars.write(grammar)
        return SentContext(sampling if sent is None else replace(sampling, grammar=None), context.num_prompt, sent)


class OrderReader:
    """Reads the orders of one writer, all of them in their order."""

    def __init__(self) -> None:
        self._contexts: dict[int, Context] = {}
        self._grammars = GrammarReader()

    def read(self, sent: SentOrder) -> StepOrder:
        """Return the order that was written."""
        before, self._contexts = self._contexts, {}
        parts, drafts = [], []
        for number, new, tokens, (cached, count, scored), table, numbers, adapters, padding, _ in sent.rows:
            context = before[number] if new is None else self._context(new)
            self._contexts[number] = context
            known = context.token_ids
            assert isinstance(known, list)
            known += tokens
            blocks = table.tolist()
            parts.append(TreeRow(known[cached : cached + count], cached, blocks, scored, adapters[0]))
            read, end, nodes, depth, start = numbers
            given = ([*blocks, *padding], read, end, nodes, depth, context)
            drafts.append(DraftRow(*given, adapter=adapters[1], draft_start=start))
        return StepOrder(parts, drafts, [row.chain for row in sent.rows], sent.sampled, sent.moves, sent.needs_logits)

    def _context(self, new: SentContext) -> Context:
        sampling = new.sampling
        if new.grammar is not None:
            sampling = replace(sampling, grammar=self._grammars.read(new.grammar, new.num_prompt))
        return Context(sampling, [], new.num_prompt)
