"""Body of `/v1/completions`."""

from typing import Any

from specdec.openai.errors import ApiError
from specdec.openai.request_model import ListOf
from specdec.openai.sampling_fields import Int, SamplingFields, check_logprobs

# OpenAI's limit of prompts.
MOST_CHOICES = 2048
Prompt = str | list[int]


class CompletionRequest(SamplingFields):
    """OpenAI's fields, and vLLM's besides."""

    prompt: str | ListOf[str] | ListOf[Int] | ListOf[ListOf[Int]]
    echo: bool | None = None
    logprobs: Int | None = None
    best_of: Int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None

    @property
    def only_echoes(self) -> bool:
        """Return whether the client wants its prompt back, with log-probabilities, and no new token."""
        return bool(self.echo) and self.max_tokens == 0

    def prompts(self) -> list[Prompt]:
        """Return the prompts, each text or token ids.

        Raises:
            ApiError: none, or too many.
        """
        given: Any = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            return [given]
        if not given:
            raise ApiError(400, "prompt is empty; give at least one", param="prompt")
        if len(given) * (self.n or 1) > MOST_CHOICES:
            message = f"prompt has {len(given)} prompts; times n, it may have at most {MOST_CHOICES}"
            raise ApiError(400, message, param="prompt")
        return list(given)

    def check_supported(self, most_logprobs: int) -> None:
        """See `SamplingFields.check_supported`."""
        super().check_supported(most_logprobs)
        if self.suffix:
            raise self.refuse("suffix", "models of this engine continue a prompt; put all text before the gap into it")
        if self.best_of is not None and self.best_of > (self.n or 1):
            message = f"best_of is {self.best_of}, more than n, {self.n or 1}; ask for n and choose among the answers"
            raise ApiError(400, message, param="best_of")
        check_logprobs(self.logprobs, most_logprobs, "logprobs")
