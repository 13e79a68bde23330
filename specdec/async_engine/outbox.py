"""Output of a request that has not been sent to the front end yet."""

from specdec.async_engine.messages import Delta
from specdec.core.outputs import Logprob
from specdec.core.request import Request, RequestGroup


class Outbox:
    """The samples of a request in the engine process, and how far the front end has them.

    A delta reaches from the last one to the present, however many steps lie between. So a front end that does not read
    costs no memory beyond the outputs themselves.

    Args:
        whole: whether the front end wants no news between the first token and the end.

    Attributes:
        number: the front end's name of the request.
    """

    def __init__(self, number: int, group: RequestGroup, whole: bool) -> None:
        self.number, self.group, self._whole = number, group, whole
        self._tokens_sent = [0] * len(group.requests)
        self._steps_sent = [0] * len(group.requests)
        self._prompt_logprobs_sent = 0
        self._unsent: dict[int, None] = {}

    def mark(self, request: Request) -> bool:
        """Note that a sample has news; return whether they are to be sent now."""
        self._unsent[request.sampling.sample_index] = None
        return not self._whole or not any(self._tokens_sent) or self.group.finished

    def take(self) -> list[Delta]:
        """Return the news of all samples that have some."""
        deltas = [self._delta(index) for index in self._unsent]
        self._unsent.clear()
        return deltas

    def _delta(self, index: int) -> Delta:
        request = self.group.requests[index]
        old = self._tokens_sent[index]
        new = self._tokens_sent[index] = request.num_output
        first_step = self._steps_sent[index]
        self._steps_sent[index] = len(request.steps)
        segments = request.detokenizer.segments(final=request.finished)
        return Delta(
            self.number,
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
        )

    def _prompt_logprobs(self, request: Request) -> list[dict[int, Logprob] | None] | None:
        if request.params.prompt_logprobs is None:
            return None
        old = self._prompt_logprobs_sent
        self._prompt_logprobs_sent = len(request.prompt_logprobs)
        return request.prompt_logprobs[old:]
