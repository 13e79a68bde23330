"""A beam: a request whose next token a search chooses."""

from collections.abc import Iterator
from dataclasses import dataclass

from specdec.outputs import Logprob
from specdec.request import Request


@dataclass(eq=False)
class BeamRequest(Request):
    """A sequence under search. Its tokens never change; its children have one more.

    A step scores what can follow it: `logprobs` then has an entry more than there are output tokens. From there on
    nothing of it is missing in the cache, so the scheduler lets it be, while its blocks wait to be shared by children.

    Attributes:
        cum_logprob: sum of the output tokens' log-probabilities.
    """

    cum_logprob: float = 0.0

    @property
    def is_scored(self) -> bool:
        return len(self.logprobs) > self.num_output

    @property
    def may_draft(self) -> bool:
        """Never: drafts foretell what a sampler picks."""
        return False

    def append(self, token: int, accepted: bool) -> None:
        """Leave the engine's token to the search, for which it is a candidate like others."""
        assert not accepted, "a beam has no drafts"
        assert token in self.logprobs[-1], "a beam is scored"

    def candidates(self) -> Iterator[tuple[int, float]]:
        """Tokens that can follow, as far as they have been scored, and the cumulative log-probability with each."""
        for token, entry in self.logprobs[-1].items():
            yield token, self.cum_logprob + entry.logprob

    @classmethod
    def root(cls, request: Request) -> "BeamRequest":
        """The first beam, without output, of a request that asks for log-probabilities and has not been queued."""
        return cls._of(request, list(request.token_ids), [], 0.0)

    def child(self, token: int) -> "BeamRequest":
        """The beam that goes on with a candidate; not yet queued."""
        cum_logprob = self.cum_logprob + self.logprobs[-1][token].logprob
        return self._of(self, [*self.token_ids, token], list(self.logprobs), cum_logprob)

    @classmethod
    def _of(
        cls, request: Request, token_ids: list[int], logprobs: list[dict[int, Logprob]], cum_logprob: float
    ) -> "BeamRequest":
        return cls(
            request_id=request.request_id,
            token_ids=token_ids,
            num_prompt=request.num_prompt,
            params=request.params,
            sampling=request.sampling,
            max_length=request.max_length,
            end_tokens=request.end_tokens,
            # Of which only the names of single tokens are asked.
            detokenizer=request.detokenizer,
            priority=request.priority,
            cache_salt=request.cache_salt,
            logprobs=logprobs,
            cum_logprob=cum_logprob,
        )
