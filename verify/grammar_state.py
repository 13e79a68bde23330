"""The state of a request's grammar: tokens that may follow its output and a path of draft tokens."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec.kernels.types.integers import ceil_div

if TYPE_CHECKING:
    # Loaded with the first structured request.
    from llguidance import LLMatcher, LLTokenizer

Mask = np.ndarray[Any, np.dtype[np.uint8]]
# Work for one mask, and states of one request's lexer (some kB each), before a request ends with an error. llguidance's
# own limits allow masks of a second, and half a GiB.
_MOST_ITEMS, _MOST_STATES = 4_000, 50_000
# Most ways to begin a text that is forced.
_MOST_CUTS = 64


class GrammarError(ValueError):
    """A grammar that cannot be compiled or followed; the message is llguidance's."""


class Grammar:
    """A grammar, compiled by llguidance for a model's tokens.

    Args:
        source: the grammar in Lark's form.
        tokens: the text of every token.

    Raises:
        GrammarError: it cannot be compiled, no text follows it, or it cannot be taken back along a draft's path.
    """

    def __init__(self, source: str, tokens: "LLTokenizer") -> None:
        from llguidance import LLMatcher, LLParserLimits

        self.tokens = tokens
        limits = LLParserLimits(step_max_items=_MOST_ITEMS, max_lexer_states=_MOST_STATES, verbose_errors=False)
        self._matcher = LLMatcher(tokens, source, log_level=0, limits=limits)
        self._check(self._matcher)
        first = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if "NoExtension" in self._matcher.get_error():
            raise GrammarError("no text follows it")
        self._check(self._matcher)
        trial = self.matcher()
        trial.try_consume_tokens(np.flatnonzero(np.unpackbits(first, bitorder="little"))[:1].tolist())
        trial.rollback(1)
        self._check(trial)

    @staticmethod
    def _check(matcher: "LLMatcher") -> None:
        if matcher.is_error():
            raise GrammarError(matcher.get_error())

    def matcher(self) -> "LLMatcher":
        """Return a matcher of a new output."""
        return self._matcher.deep_copy()

    def longest(self, tokens: Sequence[int]) -> int | None:
        """Return the token whose text begins with the text of each; None if there is none."""
        texts = [self.tokens.decode_bytes([token]) for token in tokens]
        longest = max(texts, key=len)
        return tokens[texts.index(longest)] if all(map(longest.startswith, texts)) else None


class GrammarState:
    """A matcher that follows a request's known output, and looks ahead along draft tokens.

    It reads the output whenever it is asked, so nothing has to tell it about new tokens, a preemption or a step that
    was given up: known tokens never change. Draft tokens are taken back before the next question.

    Attributes:
        error: why the grammar could not be followed along the known output, None if it could. No token is possible.

    Args:
        stop_tokens: tokens that end the output where the grammar is complete.
        num_prompt: tokens of the prompt, which the grammar does not concern.
        vocab_size: columns of the logits.
    """

    def __init__(self, grammar: Grammar, stop_tokens: frozenset[int], num_prompt: int, vocab_size: int) -> None:
        self.grammar, self.stop_tokens, self.vocab_size = grammar, stop_tokens, vocab_size
        self.error: str | None = None
        # That of the known output or of a path.
        self._problem: str | None = None
        self._matcher = grammar.matcher()
        self._num_bytes = 4 * ceil_div(vocab_size, 32)
        # A tokenizer may have more tokens than the model.
        self._words = np.empty(ceil_div(grammar.tokens.vocab_size, 32), np.int32)
        self._stops = self._bits(stop_tokens)
        # The matcher knows one set of end tokens for all requests.
        self._texts = ~self._bits(stop_tokens | frozenset(grammar.tokens.eos_tokens))
        self._num_read = num_prompt
        # Tokens of the output that the matcher has taken, draft tokens behind them, and how many of both are end
        # tokens behind the end, which the matcher does not know.
        self._output: list[int] = []
        self._path: list[int] = []
        self._num_behind_end = 0
        # Masks after the known output and a path; drafting and verification ask for the same.
        self._masks: dict[tuple[int, ...], Mask | None] = {}

    def _bits(self, tokens: frozenset[int]) -> Mask:
        bits = np.zeros(8 * self._num_bytes, np.uint8)
        bits[[token for token in tokens if token < len(bits)]] = 1
        return np.packbits(bits, bitorder="little")

    def masks(self, token_ids: Sequence[int], paths: Sequence[Sequence[int]]) -> Mask:
        """Return the tokens that may follow each path as bit sets, lowest token first, uint8 `[paths, bytes]`.

        After a path that the grammar forbids all are allowed: its last token is impossible, so nothing reads the row.

        Args:
            token_ids: prompt and output.
            paths: draft tokens behind them.
        """
        self._read(token_ids)
        rows = [self._mask(tuple(path)) for path in paths]
        every = np.full(self._num_bytes, 255, np.uint8)
        return np.stack([every if row is None else row for row in rows])

    def allows(self, token_ids: Sequence[int], path: Sequence[int]) -> bool:
        """Return whether the known output may go on with all tokens of a path."""
        self._read(token_ids)
        return self._mask(tuple(path)) is not None

    def forced(
        self, token_ids: Sequence[int], path: Sequence[int], most: int, encode: Callable[[str], list[int]]
    ) -> list[int]:
        """Return tokens that follow a path without a choice; none where the grammar leaves one, or forbids the path.

        Where it leaves one text and several ways to cut it into tokens, they are the tokenizer's: a guess.

        Args:
            most: number of tokens wanted, at least 1.
            encode: returns the tokens of a text.
        """
        self._read(token_ids)
        place = tuple(path)
        text, found = b"", list[int]()
        while len(found) < most and (mask := self._mask((*place, *found))) is not None:
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))[: _MOST_CUTS + 1].tolist()
            if len(allowed) == 1 and not text:
                # Also a special token.
                return [*found, allowed[0]]
            token = self.grammar.longest(allowed) if 0 < len(allowed) <= _MOST_CUTS else None
            if token is None or token in self.stop_tokens or self.grammar.tokens.is_special_token(token):
                break
            found.append(token)
            text += self.grammar.tokens.decode_bytes([token])
        # The longest beginning of them that the grammar has. Forwards, so that each mask finds its parent's.
        own: list[int] = []
        for token in encode(text.decode(errors="ignore"))[:most] if text else []:
            if self._mask((*place, *own, token)) is None:
                break
            own.append(token)
        return own

    def is_complete(self, token_ids: Sequence[int]) -> bool:
        """Return whether the known output is all that the grammar wants."""
        self._read(token_ids)
        self._mask(())
        self._go_to(())
        return self.error is None and self._is_at_end

    def begin_at(self, place: int) -> None:
        """Leave out all tokens before a place. Behind it no token has been read."""
        if self._num_read != place:
            self._num_read = place
            self._masks.clear()

    def _read(self, token_ids: Sequence[int]) -> None:
        """Take the known tokens that are new."""
        if self._num_read == len(token_ids):
            return
        self._go_to(())
        for token in token_ids[self._num_read :]:
            if not self._accept(token):
                self.error = self._problem
                if self.error is None:
                    raise AssertionError(f"token {token} of the output is not in its grammar")
            self._output.append(token)
        self._num_read = len(token_ids)
        self._masks.clear()

    def _mask(self, path: tuple[int, ...]) -> Mask | None:
        """Return the tokens that may follow a path, None if the grammar forbids the path."""
        if path not in self._masks:
            self._masks[path] = self._new_mask(path)
        return self._masks[path]

    def _new_mask(self, path: tuple[int, ...]) -> Mask | None:
        if path and not _has(self._mask(path[:-1]), path[-1]):
            return None
        if self.error is not None or not self._go_to(path):
            # The grammar has become too complex on the way.
            return np.zeros_like(self._stops)
        if self._num_behind_end:
            return self._stops
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        if self._matcher.is_error():
            self._begin_anew()
            if not path:
                self.error = self._problem
            return np.zeros_like(self._stops)
        mask = np.zeros_like(self._stops)
        words = self._words.view(np.uint8)[: self._num_bytes]
        np.bitwise_and(words, self._texts[: len(words)], out=mask[: len(words)])
        return mask | self._stops if self._matcher.is_accepting() else mask

    def _go_to(self, path: tuple[int, ...]) -> bool:
        """Bring the matcher behind a path; return False if the grammar forbids it."""
        common = 0
        while common < min(len(path), len(self._path)) and path[common] == self._path[common]:
            common += 1
        self._take_back(len(self._path) - common)
        del self._path[common:]
        # All of it, if the matcher had to begin anew.
        for token in path[len(self._path) :]:
            if not self._accept(token):
                return False
            self._path.append(token)
        return True

    @property
    def _is_at_end(self) -> bool:
        return self._num_behind_end > 0 or self._matcher.is_accepting()

    def _accept(self, token: int) -> bool:
        # A request that ignores end tokens goes on behind the end, with end tokens alone.
        if self._num_behind_end or token in self.stop_tokens:
            is_end = token in self.stop_tokens and self._is_at_end
            self._num_behind_end += is_end
            return is_end
        if self._matcher.try_consume_tokens([token]) == 1:
            return True
        if self._matcher.is_error():
            self._begin_anew()
        return False

    def _take_back(self, count: int) -> None:
        behind = min(count, self._num_behind_end)
        self._num_behind_end -= behind
        if count > behind and not self._matcher.rollback(count - behind):
            self._begin_anew()

    def _begin_anew(self) -> None:
        """Go on after an error, which a matcher never leaves, with one that has taken the known output."""
        self._problem = self._matcher.get_error().partition("\n")[0]
        self._matcher = self.grammar.matcher()
        self._matcher.try_consume_tokens([token for token in self._output if token not in self.stop_tokens])
        self._path.clear()


def _has(mask: Mask | None, token: int) -> bool:
    # The tokenizer may have more tokens than the mask.
    return mask is not None and token < 8 * len(mask) and bool(mask[token // 8] >> (token % 8) & 1)
