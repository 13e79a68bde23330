"""The state of a request's thinking: where it ends in its output and along a path of draft tokens."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from specdec.kernels.types.integers import ceil_div
from specdec.verify.grammar_state import GrammarState, Mask


class ThinkingMarks(NamedTuple):
    """Tokens that stand around a model's thinking.

    Attributes:
        start, end: its marks.
        also_end: tokens that end it too, and that belong to the answer.
        special: other special tokens, which begin and end the turns of a conversation.
    """

    start: int
    end: int
    also_end: frozenset[int]
    special: frozenset[int]

    def last(self, prompt: Sequence[int]) -> int | None:
        """Return the last mark of a prompt, None if its last turn has none."""
        for token in reversed(prompt):
            if token in (self.start, self.end):
                return token
            if token in self.special:
                return None
        return None

    def ends(self, has_form: bool) -> frozenset[int]:
        """Return the tokens that end the thinking before an answer with a form, or without: the end mark is in both."""
        return frozenset([self.end]) if has_form else self.also_end | {self.end}

    def num_thinking(self, output: Sequence[int], has_form: bool) -> int:
        """Return the number of tokens of an output's thinking, marks not counted."""
        ends = self.ends(has_form)
        size = next((place for place, token in enumerate(output) if token in ends), len(output))
        return size - (size > 0 and output[0] == self.start)

    def answer_place(self, output: Sequence[int], has_form: bool) -> int:
        """Return the place of an answer's first token in an output, the output's length while it thinks."""
        ends = self.ends(has_form)
        place = next((place for place, token in enumerate(output) if token in ends), len(output))
        return place + (place < len(output) and output[place] == self.end)


class ThinkingState:
    """The state of an output that thinks first: any tokens up to the end mark, and then those of its grammar.

    It is asked like a `GrammarState`, so all that follows a grammar along a path of drafts follows the thinking as
    well: on each path the grammar begins behind the path's own mark.

    Args:
        num_prompt: tokens of the prompt.
        vocab_size: columns of the logits.
        is_open: whether the start mark stands in the prompt.
        budget: most tokens of thinking, the start mark not counted, behind which the end mark alone is possible; None
            for any number.
        grammar: of the answer, which nothing has been asked of; None for any answer. An answer with a grammar begins
            behind the end mark only.
    """

    def __init__(
        self,
        marks: ThinkingMarks,
        num_prompt: int,
        vocab_size: int,
        *,
        is_open: bool,
        budget: int | None,
        grammar: GrammarState | None,
    ) -> None:
        self.marks, self.num_prompt, self.is_open = marks, num_prompt, is_open
        self.budget, self.grammar = budget, grammar
        self._ends = marks.ends(grammar is not None)
        self._num_bytes = 4 * ceil_div(vocab_size, 32)
        self._num_read = num_prompt
        self._has_ended = False

    def masks(self, token_ids: Sequence[int], paths: Sequence[Sequence[int]]) -> Mask | None:
        """See `GrammarState.masks`; None where any token may follow each path."""
        self._read(token_ids)
        rows = [self._mask(token_ids, path) for path in paths]
        if all(row is None for row in rows):
            return None
        every = np.full(self._num_bytes, 255, np.uint8)
        return np.stack([every if row is None else row for row in rows])

    def allows(self, token_ids: Sequence[int], path: Sequence[int]) -> bool:
        """See `GrammarState.allows`."""
        self._read(token_ids)
        answer = self._answer(path)
        thought = path if answer is None else path[: len(path) - len(answer)]
        if self.budget is not None and not self._has_ended:
            for place, token in enumerate(thought):
                if self._only(token_ids, path[:place]) not in (None, token):
                    return False
        return answer is None or self.grammar is None or self.grammar.allows(token_ids, answer)

    def forced(
        self, token_ids: Sequence[int], path: Sequence[int], most: int, encode: Callable[[str], list[int]]
    ) -> list[int]:
        """See `GrammarState.forced`."""
        self._read(token_ids)
        answer = self._answer(path)
        if answer is not None:
            return [] if self.grammar is None else self.grammar.forced(token_ids, answer, most, encode)
        only = self._only(token_ids, path)
        return [] if only is None else [only]

    def is_complete(self, token_ids: Sequence[int]) -> bool:
        """See `GrammarState.is_complete`; thinking is never complete."""
        self._read(token_ids)
        return self._has_ended and self.grammar is not None and self.grammar.is_complete(token_ids)

    @property
    def error(self) -> str | None:
        """See `GrammarState`."""
        return None if self.grammar is None else self.grammar.error

    def _read(self, token_ids: Sequence[int]) -> None:
        """Look for the end among the known tokens that are new, and tell the grammar where the answer begins."""
        if self._has_ended:
            return
        begin = len(token_ids)
        for place in range(self._num_read, len(token_ids)):
            if token_ids[place] in self._ends:
                self._has_ended, begin = True, place + 1
                break
        self._num_read = begin
        if self.grammar is not None:
            self.grammar.begin_at(begin)

    def _answer(self, path: Sequence[int]) -> Sequence[int] | None:
        """Return the part of a path that belongs to the answer, None if the path ends within the thinking."""
        if self._has_ended:
            return path
        for place, token in enumerate(path):
            if token in self._ends:
                return path[place + 1 :]
        return None

    def _mask(self, token_ids: Sequence[int], path: Sequence[int]) -> Mask | None:
        """Return the tokens that may follow a path, None for any."""
        answer = self._answer(path)
        if answer is not None:
            return None if self.grammar is None else self.grammar.masks(token_ids, [answer])[0]
        only = self._only(token_ids, path)
        if only is None:
            return None
        mask = np.zeros(self._num_bytes, np.uint8)
        mask[only // 8] = 1 << only % 8
        return mask

    def _only(self, token_ids: Sequence[int], path: Sequence[int]) -> int | None:
        """Return the only token that may follow a path within the thinking, None for any."""
        if self.budget is None:
            return None
        count = len(token_ids) - self.num_prompt + len(path)
        if count == 0:
            # Thinking of no token at all has both marks, as chat templates write it.
            is_missing = self.budget == 0 and not self.is_open
            return self.marks.start if is_missing else self.marks.end if self.budget == 0 else None
        first = token_ids[self.num_prompt] if len(token_ids) > self.num_prompt else path[0]
        return self.marks.end if count - (first == self.marks.start) >= self.budget else None
