"""Which states of a running request are shown, and what of its output they hold, by vLLM's names. Pure Python."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum

from specdec.core.outputs import CompletionOutput, RequestOutput


class RequestOutputKind(Enum):
    """States that a stream yields. Calls that return when a request has ended always return its whole output.

    CUMULATIVE: the whole output so far. DELTA: what is new since the state before. FINAL_ONLY: the last state alone.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class ShownStates:
    """The states of one request as its kind of output shows them."""

    kind: RequestOutputKind
    _num_shown: dict[int, int] = field(default_factory=dict)

    def of(self, state: RequestOutput) -> Iterator[RequestOutput]:
        """Yield what is shown of the request's next state, or nothing."""
        if self.kind is RequestOutputKind.DELTA:
            yield replace(state, outputs=[self._delta(output) for output in state.outputs])
        elif self.kind is not RequestOutputKind.FINAL_ONLY or state.finished:
            yield state

    def _delta(self, output: CompletionOutput) -> CompletionOutput:
        old = self._num_shown.get(output.index, 0)
        self._num_shown[output.index] = len(output.token_ids)
        return replace(
            output,
            text="".join(segment.text for segment in output.segments),
            token_ids=output.token_ids[old:],
            accepted=output.accepted[old:],
            logprobs=None if output.logprobs is None else output.logprobs[old:],
        )
