"""Output of a request that has not been sent to the front end yet."""

import math

from specdec.core.commands import Delta
from specdec.core.outputs import Logprob
from specdec.core.request import Request, RequestGroup


class Outbox:
    """The samples of a request in the engine process, and how far the front end has them.

    A delta reaches from the last one to the present, however many steps lie between. So a front end that does not read
    costs no memory beyond the outputs themselves.

    Args:
        interval: seconds for which news after the first token may wait; infinity for none until the end.

    Attributes:
        number: that of the front end's call.
    """

    def __init__(self, number: int, group: RequestGroup, interval: float) -> None:
        self.number, self.group, self._interval = number, group, interval
        self._due = -math.inf
        self._tokens_sent = [0] * len(group.requests)
        self._steps_sent = [0] * len(group.requests)
        self._prompt_logprobs_sent = 0
        self._unsent: dict[int, None] = {}

    def mark(self, request: Request) -> None:
        """Note that a sample has news."""
        self._unsent[request.sampling.sample_index] = None

    def is_due(self, now: float) -> bool:
        """Return whether news, if there are any, are to be sent at this moment."""
        return now >= self._due or self.group.finished

    def take(self, now: float) -> list[Delta]:
        """Return the news of all samples that have some."""
        deltas = [self._delta(index) for index in self._unsent]
        self._unsent.clear()
        if any(self._tokens_sent):
            # Moments that all requests of this interval share, so that one message has the news of all.
            is_shared = 0 < self._interval < math.inf
            self._due = (now // self._interval + 1) * self._interval if is_shared else now + self._interval
        return deltas

    def _delta(self, index: int) -> Delta:
        request = self.group.requests[index]
        old = self._tokens_sent[index]
        new = self._tokens_sent[index] = request.num_output
        first_step = self._steps_sent[index]
        self._steps_sent[index] = len(request.steps)
        segments = request.detokenizer.segments(final=request.finished)
        shows_times = old == 0 or self.group.finished
        return Delta(
            index,
            request.token_ids[request.num_prompt + old :],
            request.accepted[old:],
            segments,
            request.detokenizer.held,
            request.stats,
            request.steps[first_step:],
            request.finish_reason,
            request.stop_reason,
            request.error,
            None if request.params.logprobs is None else request.logprobs[old:new],
            self._prompt_logprobs(request),
            self.group.requests[0].num_cached_prompt if shows_times else None,
            self.group.metrics() if shows_times else None,
            request.choices.scores() if request.choices is not None and request.choices.is_complete else None,
        )

    def _prompt_logprobs(self, request: Request) -> list[dict[int, Logprob] | None] | None:
        if request.params.prompt_logprobs is None:
            return None
        old = self._prompt_logprobs_sent
        self._prompt_logprobs_sent = len(request.prompt_logprobs)
        return request.prompt_logprobs[old:]
