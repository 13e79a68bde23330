"""Drafts of requests whose output follows a grammar: forced tokens as a chain, and trees without forbidden nodes."""

from collections.abc import Callable, Sequence

from specdec.draft_heads.drafting.chains import LONGEST_MATCH, Chain, ChainRates
from specdec.kernels.types.draft_trees import DraftTrees, HostTrees
from specdec.kernels.types.tree import ROOT, DraftTree
from specdec.verify.grammar_state import GrammarState
from specdec.verify.sampling import Context
from specdec.verify.thinking_state import ThinkingState


class ForcedText:
    """Source of one chain: tokens of the text that a grammar leaves no choice about.

    Other tokens may spell the same text, so they are drafts like others.

    Args:
        rates: acceptance of such chains.
        encode: returns the tokens of a text.
    """

    def __init__(
        self, grammar: GrammarState | ThinkingState, rates: ChainRates, encode: Callable[[str], list[int]]
    ) -> None:
        self.grammar, self.rates, self.encode = grammar, rates, encode

    def chains(self, token_ids: Sequence[int], depth: int) -> list[Chain]:
        """See `ChainSource.chains`."""
        found: list[int] = []
        while (most := depth - len(found)) > 0 and (new := self.grammar.forced(token_ids, found, most, self.encode)):
            found += new
        return [Chain(found, LONGEST_MATCH, self.rates)] if found else []


def without_forbidden(trees: DraftTrees, contexts: Sequence[Context]) -> DraftTrees:
    """Remove the nodes that the requests' grammars forbid, and those below them.

    A batch without a grammar passes through untouched. Otherwise its trees are read on the host, which waits for a
    device, as grammars are followed there.

    Args:
        contexts: of each row.
    """
    grammars = [context.sampling.grammar for context in contexts]
    if not any(grammar is not None and size for grammar, size in zip(grammars, trees.sizes, strict=True)):
        return trees
    return HostTrees([pruned(tree, context) for tree, context in zip(trees.with_probs(), contexts, strict=True)])


def pruned(tree: DraftTree, context: Context) -> DraftTree:
    """Return a tree without the nodes that the request's grammar forbids, and those below them.

    Drawn trees stay exact: their nodes were drawn within the grammar, but for those that q could not draw, which no
    rule accepts.
    """
    grammar = context.sampling.grammar
    if grammar is None or not len(tree):
        return tree
    paths = [[token for token in path if token >= 0] for path in tree.path_tokens[1:]]
    kept = [node for node, path in enumerate(paths) if grammar.allows(context.token_ids, path)]
    if len(kept) == len(tree):
        return tree
    place = {ROOT: ROOT, **{node: index for index, node in enumerate(kept)}}
    probs, read, drafted = tree.draft_probs, tree.read_values, len(tree) - tree.num_chained

    def read_values() -> list[float]:
        assert read is not None
        values = read()
        return [values[node] for node in kept if node < drafted]

    return DraftTree(
        tokens=tuple(tree.tokens[node] for node in kept),
        parents=tuple(place[tree.parents[node]] for node in kept),
        draft_probs=None if probs is None else probs[[0, *(1 + node for node in kept)]],
        ranks=tuple(tree.ranks[node] for node in kept) if tree.ranks else (),
        read_values=None if read is None else read_values,
        num_chained=sum(node >= drafted for node in kept),
    )
