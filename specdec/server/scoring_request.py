"""Body of `/v1/score_choices`."""

from typing import ClassVar

from specdec.core.sampling_params import SamplingParams
from specdec.server.chat_request import TemplateFields
from specdec.server.completion_request import MOST_CHOICES
from specdec.server.errors import ApiError, bad_request
from specdec.server.sampling_fields import Int, SamplingFields

# Each choice is tokenized together with its prompt, so that this many characters take some seconds.
MOST_CHARACTERS = 1 << 24


class ScoringRequest(TemplateFields):
    """A prompt or a conversation, and texts or token ids that may follow it."""

    # As requests that generate have them.
    stream: ClassVar[bool] = False
    trace: ClassVar[bool] = False
    structure_field: ClassVar[str] = "choices"
    sent_names: ClassVar[dict[str, str]] = {}
    # Pydantic reports a missing field only where it is required.
    choices: list[str] | list[list[Int]]
    model: str | None = None
    prompt: str | list[Int] | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    user: str | None = None

    def sampling_params(self) -> SamplingParams:
        """Return the parameters of the engine's request.

        Raises:
            ApiError: a field that asks for generated text, no choices or too many, or an empty one.
        """
        for name in self.unknown_fields():
            if name in SamplingFields.model_fields and (self.model_extra or {})[name] is not None:
                raise self.refuse(name, "choices are scored and nothing is generated; leave it out")
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        if self.messages is None:
            self.check_prompt()
        if len(self.choices) > MOST_CHOICES:
            message = f"choices holds {len(self.choices)}; it may hold at most {MOST_CHOICES}"
            raise ApiError(400, message, param="choices")
        if isinstance(self.prompt, str) and len(self.prompt) * len(self.choices) > MOST_CHARACTERS:
            message = (
                f"the prompt has {len(self.prompt)} characters, times {len(self.choices)} choices; it may be at most "
                f"{MOST_CHARACTERS}: give token ids, or fewer choices at a time"
            )
            raise ApiError(400, message, param="prompt")
        try:
            return SamplingParams(choices=self.choices, max_tokens=None)
        except ValueError as error:
            raise bad_request(error, ("choices",)) from None
