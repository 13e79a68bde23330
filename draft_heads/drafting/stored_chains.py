"""Chains from earlier texts: continuations of the last tokens in what was asked and answered before.

The idea of SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975); here continuations are valued by measured rates per
length of the match, like all chains. Pure Python.
"""

import itertools
from collections.abc import Sequence
from hashlib import sha256

from specdec.draft_heads.drafting.chains import Chain, ChainRates, ChainSource
from specdec.kernels.types.text_store import LONGEST, NO_PAGE, ORDERS, Space, TextStore

# Tokens of an output after which they are written: each write costs as much as several tokens.
STRIDE = 16
# Of the corpus, in which all requests search. No hash gives it.
CORPUS: Space = (0, 0)


class DraftStore:
    """Texts of earlier requests and of a corpus, in which the requests of an engine find chains.

    It depends on the requests and their tokens alone, so that equal ranks have equal stores.

    Args:
        texts: holds the tokens.
        most: most continuations of a search.
    """

    def __init__(self, texts: TextStore, most: int) -> None:
        self.texts, self.most = texts, most
        self.rates = ChainRates(shorter=2)
        self.has_corpus = False
        self._numbers = itertools.count()

    def add_corpus(self, tokens: Sequence[int]) -> None:
        """Add a text in which all requests search."""
        self.has_corpus = True
        self.texts.append(next(self._numbers), CORPUS, NO_PAGE, tokens, 0)

    def open(self, owner: Sequence[str | None], own: ChainSource) -> "StoredText":
        """Return the source of a new request, whose text becomes a part of the store.

        Args:
            owner: requests find the texts of equal owners alone.
            own: finds chains in the request's own text.
        """
        digest = sha256(repr(tuple(owner)).encode(errors="surrogatepass")).digest()
        space = int.from_bytes(digest[:8]), int.from_bytes(digest[8:16])
        return StoredText(self, next(self._numbers), space, own)


class StoredText:
    """Source of a request's chains: its own text, other texts of its space and the corpus.

    Chains of greater rates come first, and among equals those of its own text.

    Args:
        number: of the text in the store.
    """

    def __init__(self, store: DraftStore, number: int, space: Space, own: ChainSource) -> None:
        self._store, self._number, self._space, self._own = store, number, space, own
        self._rates = ChainRates(store.rates)
        self._page, self._written = NO_PAGE, 0
        # What the store has offered: the number of known tokens, and by the token after them the places.
        self._known = 0
        self._offered: list[tuple[int, int]] = []

    def chains(self, token_ids: Sequence[int], depth: int) -> list[Chain]:
        """See `ChainSource.chains`."""
        store, last = self._store, token_ids[-LONGEST:]
        found = store.texts.find(self._number, self._space, last, store.most, depth)
        if store.has_corpus:
            found += store.texts.find(self._number, CORPUS, last, store.most, depth)
        self._known, self._offered = len(token_ids), [(tokens[0], place) for _, place, tokens in found]
        stored = [Chain(tokens, match, self._rates) for match, _, tokens in found]
        return sorted([*self._own.chains(token_ids, depth), *stored], key=lambda chain: -chain.rates.rate(chain.match))

    def follow(self, token_ids: Sequence[int], num_cached_prompt: int, *, ended: bool) -> None:
        """Write the request's new tokens to the store, and mark the places that predicted them as useful.

        Args:
            num_cached_prompt: tokens of the prompt that the prefix cache had: an earlier request of the same salt has
                written them.
            ended: whether no more follow.
        """
        if self._offered and len(token_ids) > self._known:
            for token, place in self._offered:
                if token == token_ids[self._known]:
                    self._store.texts.touch(place)
            self._offered = []
        if self._page == NO_PAGE:
            self._written = max(0, num_cached_prompt - ORDERS[-1])
        elif len(token_ids) - self._written < STRIDE and not ended:
            return
        known = min(ORDERS[-1], self._written) if self._page != NO_PAGE else 0
        new = token_ids[self._written - known :]
        self._page = self._store.texts.append(self._number, self._space, self._page, new, known)
        self._written = len(token_ids)
