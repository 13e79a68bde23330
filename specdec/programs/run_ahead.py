"""Text that an endpoint wrote beyond the end of a `gen`, from which the next ones are served. Pure Python.

A `gen` asks an endpoint for more than it needs: for further tokens, and past its stop. If the constant text that
follows is what the model wrote there, the next `gen` begins within the answer, and may need no call of its own.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from specdec.core.sampling_params import SamplingParams


class Served(NamedTuple):
    """A `gen` that was served from an answer.

    Attributes:
        finish_reason: "stop" or "length", as plain execution reports it.
        num_tokens: tokens until its end, those of its stop included.
        ahead: what is left of the answer behind it.
    """

    text: str
    finish_reason: str
    num_tokens: int
    ahead: "WrittenAhead"


class WrittenAhead:
    """Tokens that an endpoint wrote at temperature 0 behind a text.

    Args:
        tokens: the texts of its tokens.
        has_ended: whether the model ended its answer behind them.
        skipped: characters of the first token that are behind the text already.
    """

    def __init__(self, tokens: Sequence[str], has_ended: bool, skipped: int = 0) -> None:
        self.tokens, self.has_ended, self.skipped = list(tokens), has_ended, skipped

    @property
    def text(self) -> str:
        """The text that follows."""
        return "".join(self.tokens)[self.skipped :]

    def after(self, constant: str) -> "WrittenAhead | None":
        """Return what follows a constant text, None if the model wrote another one."""
        return self._from(len(constant)) if self.text.startswith(constant) else None

    def _from(self, length: int) -> "WrittenAhead":
        """Return what follows the next characters."""
        length += self.skipped
        ends = list(accumulate(map(len, self.tokens)))
        count = sum(end <= length for end in ends)
        return WrittenAhead(self.tokens[count:], self.has_ended, length - (ends[count - 1] if count else 0))

    def serve(self, params: SamplingParams) -> Served | None:
        """Return what a `gen` with these parameters gets here, None if the answer does not reach to its end.

        A `gen` begins between two tokens. Within one, a call would have the text before it in other tokens than the
        model wrote, and might give another text.
        """
        if self.skipped:
            return None
        limit = len(self.tokens) if params.max_tokens is None else params.max_tokens
        text = ""
        for count, token in enumerate(self.tokens[:limit], 1):
            # A stop ends with the token that completes it; of several, the one that begins first is cut off.
            text += token
            places = [place for stop in params.stop_strings if (place := text.find(stop)) >= 0]
            if places:
                text = text[: min(places)]
                return Served(text, "stop", count, self._from(len(text)))
        if len(self.tokens) >= limit and params.max_tokens is not None:
            return Served(text, "length", limit, self._from(len(text)))
        return Served(text, "stop", len(self.tokens), self._from(len(text))) if self.has_ended else None


def can_run_ahead(given: Iterable[str], params: SamplingParams) -> bool:
    """Return whether a `gen` may run ahead: at temperature 0, where no parameter depends on where an output begins.

    Args:
        given: names of the parameters that were given.
    """
    return params.temperature == 0 and set(given) <= {"temperature", "max_tokens", "stop"}
