"""The state of a request's grammar: tokens that may follow its output and a path of draft tokens."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec.kernels.types.integers import ceil_div

if TYPE_CHECKING:
    # Loaded with the first structured request.
    from xgrammar import CompiledGrammar

Mask = np.ndarray[Any, np.dtype[np.uint8]]


class Grammar:
    """A grammar, compiled by xgrammar for a model's tokens."""

    def __init__(self, compiled: "CompiledGrammar") -> None:
        self.compiled = compiled

    @cached_property
    def text(self) -> str:
        """The compiled grammar as JSON, which other processes read several times faster than they compile it."""
        return str(self.compiled.serialize_json())

    @cached_property
    def num_bytes(self) -> int:
        """Memory that the compiled grammar takes, about."""
        return int(self.compiled.memory_size_bytes)


class GrammarState:
    """A matcher that follows a request's known output, and looks ahead along draft tokens.

    It reads the output whenever it is asked, so nothing has to tell it about new tokens, a preemption or a step that
    was given up: known tokens never change. Draft tokens are taken back before the next question.

    Args:
        stop_tokens: tokens that end the output where the grammar is complete.
        num_prompt: tokens of the prompt, which the grammar does not concern.
        vocab_size: columns of the logits.
    """

    def __init__(self, grammar: Grammar, stop_tokens: frozenset[int], num_prompt: int, vocab_size: int) -> None:
        from xgrammar import GrammarMatcher

        self.grammar, self.stop_tokens, self.vocab_size = grammar, stop_tokens, vocab_size
        # Without a stop token, the matcher would take all that it finds in the vocabulary.
        self._matcher = GrammarMatcher(grammar.compiled, override_stop_tokens=sorted(stop_tokens) or None)
        self._num_bytes = 4 * ceil_div(vocab_size, 32)
        self._num_read = num_prompt
        # Draft tokens that the matcher has taken, and tokens behind the end, which it does not know.
        self._path: list[int] = []
        self._num_behind_end = 0
        # Masks after the known output and a path; drafting and verification ask for the same.
        self._masks: dict[tuple[int, ...], Mask | None] = {}

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
        mask = self._mask(place)
        if mask is None:
            return []
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if len(allowed) == 1:
            return [int(allowed[0])]
        self._go_to(place)
        if self._matcher.is_terminated():
            return []
        text = self._matcher.find_jump_forward_string()
        # The longest beginning of them that the grammar has. Forwards, so that each mask finds its parent's.
        found: list[int] = []
        for token in encode(text)[:most] if text else []:
            if self._mask((*place, *found, token)) is None:
                break
            found.append(token)
        return found

    def is_complete(self, token_ids: Sequence[int]) -> bool:
        """Return whether the known output is all that the grammar wants."""
        self._read(token_ids)
        self._go_to(())
        return self._matcher.is_terminated() or self._matcher.is_completed()

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
                raise AssertionError(f"token {token} of the output is not in its grammar")
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
        if not self._go_to(path):
            return None
        words = np.zeros((1, self._num_bytes // 4), np.int32)
        if self._matcher.is_terminated():
            bits = np.zeros(8 * self._num_bytes, np.uint8)
            bits[sorted(self.stop_tokens)] = 1
            return np.packbits(bits, bitorder="little")
        self._matcher.fill_next_token_bitmask(words)
        mask: Mask = words[0].view(np.uint8)
        return mask

    def _go_to(self, path: tuple[int, ...]) -> bool:
        """Bring the matcher behind a path; return False if the grammar forbids it."""
        common = 0
        while common < min(len(path), len(self._path)) and path[common] == self._path[common]:
            common += 1
        self._take_back(len(self._path) - common)
        del self._path[common:]
        for token in path[common:]:
            if not self._accept(token):
                return False
            self._path.append(token)
        return True

    def _accept(self, token: int) -> bool:
        # A request that ignores end tokens goes on behind the end, with end tokens alone.
        if self._matcher.is_terminated():
            self._num_behind_end += token in self.stop_tokens
            return token in self.stop_tokens
        return self._matcher.accept_token(token)

    def _take_back(self, count: int) -> None:
        behind = min(count, self._num_behind_end)
        self._num_behind_end -= behind
        if count > behind:
            self._matcher.rollback(count - behind)


def _has(mask: Mask | None, token: int) -> bool:
    # The tokenizer may have more tokens than the mask.
    return mask is not None and token < 8 * len(mask) and bool(mask[token // 8] >> (token % 8) & 1)
