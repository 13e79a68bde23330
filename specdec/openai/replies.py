"""Answers of the API, in the shapes of OpenAI and vLLM. UNSET fields are left out."""

import time
from collections.abc import Iterable

import msgspec
from fastapi import Response
from msgspec import Struct, field

from specdec.core.outputs import RequestOutput
from specdec.core.step_report import StepReport
from specdec.openai.speculation_replies import SglExt, SpecTokensDetails, SpeculationMetrics

JSON = "application/json"


def json_response(body: object) -> Response:
    """Return an answer with a JSON body."""
    return Response(msgspec.json.encode(body), media_type=JSON)


def now() -> int:
    """Return seconds since 1970."""
    return int(time.time())


class CompletionTokensDetails(Struct):
    """Parts of the completion: tokens of a predicted output that appeared in it and that did not, and of thinking."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    reasoning_tokens: int = 0


class PromptTokensDetails(Struct):
    """Parts of the prompt: tokens found in the prefix cache."""

    cached_tokens: int = 0


class Usage(Struct):
    """Counts of tokens.

    Attributes:
        completion_tokens_details: where the request had a prediction, or the model thinks.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def of(cls, prompt: int, completion: int, states: Iterable[RequestOutput]) -> "Usage":
        """Return the counts of an answer; its states say how many tokens of their prompts were cached."""
        cached = sum(state.num_cached_tokens or 0 for state in states)
        return cls(prompt, completion, prompt + completion, PromptTokensDetails(cached))


class CompletionLogprobs(Struct):
    """Log-probabilities of `/v1/completions`: lists with an entry per token.

    Attributes:
        text_offset: where the token's text begins in the choice's text.
        top_logprobs: the most probable tokens' texts and log-probabilities.
    """

    text_offset: list[int] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)


class PromptLogprob(Struct):
    """Log-probability of a token of the prompt, as in vLLM."""

    logprob: float
    rank: int
    decoded_token: str | None


class CompletionChoice(Struct):
    """One generated text, or a part of it.

    Attributes:
        stop_reason: the stop string or token that ended it, as in vLLM.
        prompt_logprobs: per prompt token, its entry and those of the most probable tokens, as in vLLM.
        prompt_token_ids, token_ids: tokens of prompt and output, as in vLLM.
        trace: steps with their draft trees.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    meta_info: SpecTokensDetails | msgspec.UnsetType = msgspec.UNSET
    trace: list[StepReport] | msgspec.UnsetType = msgspec.UNSET


class Answer(Struct, kw_only=True):
    """Fields that all answers with choices have, whole ones and each part of a streamed one.

    Attributes:
        id: the answer's id.
        created: seconds since 1970.
    """

    id: str
    created: int
    model: str
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    metrics: SpeculationMetrics | msgspec.UnsetType | None = msgspec.UNSET
    sglext: SglExt | msgspec.UnsetType | None = msgspec.UNSET


class Completion(Answer, kw_only=True):
    """Answer of `/v1/completions`, and each part of a streamed one."""

    object: str = "text_completion"
    choices: list[CompletionChoice]


class TopLogprob(Struct):
    """A token's text, its UTF-8 bytes, and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A generated token's text, bytes and log-probability, and those of its most probable alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Log-probabilities of `/v1/chat/completions`."""

    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(Struct):
    """A function that the model calls, with its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Struct, kw_only=True):
    """A call of a tool."""

    id: str
    type: str = "function"
    function: FunctionCall


class FunctionDelta(Struct):
    """A part of a function call: its name with the first one, a piece of the arguments' JSON text with each."""

    arguments: str
    name: str | msgspec.UnsetType = msgspec.UNSET


class ToolCallDelta(Struct):
    """A part of a call of a tool; `id` and `type` come with the first one.

    Attributes:
        index: the call's number in the answer.
    """

    index: int
    function: FunctionDelta
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: str | msgspec.UnsetType = msgspec.UNSET


class ChatMessage(Struct):
    """The assistant's answer.

    Attributes:
        reasoning, reasoning_content: the model's thinking, by vLLM's names of now and of before.
    """

    role: str
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(Struct, omit_defaults=True):
    """New parts of the assistant's answer."""

    role: str | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatChoice(Struct):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    meta_info: SpecTokensDetails | msgspec.UnsetType = msgspec.UNSET
    trace: list[StepReport] | msgspec.UnsetType = msgspec.UNSET


class ChatAnswerFields(Answer, kw_only=True):
    """Fields that whole and streamed answers of `/v1/chat/completions` have.

    Attributes:
        prompt_logprobs, prompt_token_ids: as in `CompletionChoice`; of a stream, its first part has them.
    """

    prompt_logprobs: list[dict[int, PromptLogprob] | None] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(ChatAnswerFields, kw_only=True):
    """Answer of `/v1/chat/completions`."""

    object: str = "chat.completion"
    choices: list[ChatChoice]


class ChatChunkChoice(Struct):
    """A part of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    meta_info: SpecTokensDetails | msgspec.UnsetType = msgspec.UNSET
    trace: list[StepReport] | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(ChatAnswerFields, kw_only=True):
    """A part of a streamed answer of `/v1/chat/completions`."""

    object: str = "chat.completion.chunk"
    choices: list[ChatChunkChoice]


class ModelCard(Struct, kw_only=True):
    """A served model."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "specdec"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(Struct, kw_only=True):
    """Answer of `/v1/models`."""

    object: str = "list"
    data: list[ModelCard]


class Tokenized(Struct):
    """Answer of `/tokenize`, as in vLLM."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Struct):
    """Answer of `/detokenize`, as in vLLM."""

    prompt: str


class ScoredChoice(Struct):
    """A choice and its scores.

    Attributes:
        text: as it was given; that of its tokens where those were given.
        token_logprobs: per token, its log-probability after the prompt and the tokens before it.
        cumulative_logprob, normalized_logprob: their sum and their mean.
    """

    index: int
    text: str | None
    token_ids: list[int]
    token_logprobs: list[float]
    cumulative_logprob: float
    normalized_logprob: float


class ChoiceScores(Struct, kw_only=True):
    """Answer of `/v1/score_choices`."""

    id: str
    object: str = "choice_scores"
    created: int
    model: str
    choices: list[ScoredChoice]
    usage: Usage


class Aborted(Struct):
    """Answer of `/abort`: whether such a request was running."""

    aborted: bool


class DraftUpdate(Struct):
    """Answer of `/update_draft`: the head that drafts from now on."""

    draft: str


class Version(Struct):
    """Answer of `/version`."""

    version: str
