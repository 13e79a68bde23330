"""The samples of one prompt, which the engine runs as requests of their own."""

from dataclasses import dataclass

from specdec.outputs import RequestOutput
from specdec.request import Request


@dataclass(frozen=True, eq=False)
class RequestGroup:
    """A prompt and its `SamplingParams.n` requests.

    Attributes:
        prompt: text as given, None for token ids.
        prompt_token_ids: the prompt's tokens.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    requests: list[Request]

    @property
    def finished(self) -> bool:
        return all(request.finished for request in self.requests)

    def output(self) -> RequestOutput:
        """A snapshot of all samples."""
        first = self.requests[0]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[request.completion() for request in self.requests],
            finished=self.finished,
            prompt_logprobs=None if first.params.prompt_logprobs is None else list(first.prompt_logprobs),
        )
