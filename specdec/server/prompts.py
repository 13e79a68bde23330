"""Routes of prompts and conversations: completions, chats, responses, Anthropic's messages, and scores of choices."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from fastapi import APIRouter, Request, Response

from specdec.core.choices import ChoiceScore
from specdec.core.sampling_params import SamplingParams
from specdec.openai.chat_answer import ChatAnswer
from specdec.openai.chat_request import ChatRequest, content_text
from specdec.openai.completion_answer import CompletionAnswer
from specdec.openai.completion_request import CompletionRequest
from specdec.openai.errors import ApiError, code_of
from specdec.openai.messages_answer import InputTokens, MessageReply, MessagesAnswer
from specdec.openai.messages_request import MessagesRequest
from specdec.openai.operation_requests import ScoringRequest
from specdec.openai.replies import ChatCompletion, ChoiceScores, Completion, ScoredChoice, Usage, json_response, now
from specdec.openai.responses_answer import ResponseReply, ResponsesAnswer
from specdec.openai.responses_request import ResponsesRequest
from specdec.openai.served_model import ServedModel
from specdec.server.json_route import JsonRoute
from specdec.server.openapi import answers
from specdec.server.service import AnswerMaker, Service, service_of

router = APIRouter(route_class=JsonRoute)
Body = TypeVar("Body", ChatRequest, ResponsesRequest)
# OpenAI's and vLLM's.
DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions", responses=answers(Completion, may_stream=True))
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue prompts."""
    service = service_of(request).accept(body, body.model)
    body.check_supported(service.settings.max_logprobs)
    given, params = body.prompts(), _completion_params(body, service)
    special = body.add_special_tokens is not False
    prompts = await service.tokens(request, given, special, may_be_longer=params.truncate_prompt_tokens is not None)
    most = params.truncate_prompt_tokens or max(map(len, prompts))
    # A truncated prompt is echoed as the text of the tokens that are left.
    texts = [
        prompt if isinstance(prompt, str) and len(tokens) <= most else None
        for prompt, tokens in zip(given, prompts, strict=True)
    ]
    prompts = [tokens[-most:] for tokens in prompts]
    answer_id = f"cmpl-{request.state.request_id}"
    answer = CompletionAnswer(answer_id, service.served, body, texts, prompts, params)
    states = service.run(answer_id, prompts, params, request, body)
    return await service.reply(request, answer, states, len(prompts), bool(body.stream))


def _completion_params(body: CompletionRequest, service: Service) -> SamplingParams:
    asked = body.prompt_logprobs
    if asked is None and body.echo:
        asked = body.logprobs
    params = body.sampling_params(
        {"max_tokens": DEFAULT_MAX_TOKENS, **service.defaults},
        # The engine generates a token at least.
        max_tokens=1 if body.only_echoes else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=asked,
    )
    service.leave_room(params)
    return params


@router.post("/v1/chat/completions", responses=answers(ChatCompletion, may_stream=True))
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    service_of(request).accept(body, body.model)
    return await _answered(body, request, "chatcmpl", ChatAnswer)


@router.post("/v1/responses", responses=answers(ResponseReply, may_stream=True))
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation. Answers are not stored."""
    service_of(request).accept(body, body.model)
    return await _answered(body, request, "resp", ResponsesAnswer)


@router.post("/v1/messages", responses=answers(MessageReply, may_stream=True))
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation."""
    service_of(request).accept(body, body.model)
    if body.max_tokens is None:
        raise ApiError(400, "max_tokens is missing; give the most tokens of the answer", param="max_tokens")
    return await _answered(_chat(body, request), request, "msg", MessagesAnswer)


@router.post("/v1/messages/count_tokens", responses=answers(InputTokens))
async def count_tokens(body: MessagesRequest, request: Request) -> Response:
    """Count the tokens of a conversation."""
    service_of(request).accept(body, body.model)
    prompt, _ = await _prepared(_chat(body, request), request)
    return json_response(InputTokens(len(prompt)))


def _chat(body: MessagesRequest, request: Request) -> ChatRequest:
    """Return the chat that a request in Anthropic's form stands for."""
    return body.chat(may_think=service_of(request).served.reasoning is not None)


async def _answered(
    body: Body, request: Request, prefix: str, kind: Callable[[str, ServedModel, Body, SamplingParams], AnswerMaker]
) -> Response:
    """Return the answer to a conversation, of a kind whose ids begin with a prefix."""
    service, answer_id = service_of(request), f"{prefix}-{request.state.request_id}"
    prompt, params = await _prepared(body, request)
    answer = kind(answer_id, service.served, body, params)
    states = service.run(answer_id, [prompt], params, request, body, body.PROMPT_FIELD)
    return await service.reply(request, answer, states, 1, bool(body.stream))


async def _prepared(body: ChatRequest | ResponsesRequest, request: Request) -> tuple[list[int], SamplingParams]:
    """Return the tokens of a conversation, and the parameters of its answer.

    Raises:
        ApiError: what is not supported, or does not fit.
    """
    service = service_of(request)
    body.check_supported(service.settings.max_logprobs)
    if body.calls.mode == "auto":
        service.check_chosen_tools()
    prediction = body.prediction if isinstance(body, ChatRequest) else None
    params = body.sampling_params(
        # Without a limit, an answer may go on to the end of the context.
        {"max_tokens": None, **service.defaults},
        body.forced_calls(service.served.tool_parser, service.tool_tags),
        max_tokens=body.limit,
        logprobs=body.num_logprobs,
        prediction=None if prediction is None else content_text(prediction.content, "", "prediction"),
    )
    if isinstance(body, ResponsesRequest) and body.truncation == "auto":
        params.truncate_prompt_tokens = -1
    service.leave_room(params)
    is_cut, arguments = params.truncate_prompt_tokens is not None, body.template_arguments()
    prompt = await service.chat_tokens(request, body.chat_messages(), arguments, body.PROMPT_FIELD, is_cut)
    if service.served.reasoning is not None:
        service.served.reasoning.begin(params, service.served.needed_tokenizer, prompt, arguments)
    return prompt, params


@router.post("/v1/score_choices", responses=answers(ChoiceScores))
async def score_choices(body: ScoringRequest, request: Request) -> Response:
    """Return the log-probabilities of given continuations of a prompt, scored in one pass."""
    service = service_of(request).accept(body, body.model)
    tokens, params = await _scored(service, body, request)
    answer_id = f"score-{request.state.request_id}"
    states = service.run(answer_id, [tokens], params, request, body)
    (state,) = await service.final(request, states, 1)
    scores = state.choices or []
    count = len(tokens) + sum(len(score.token_ids) for score in scores)
    reply = ChoiceScores(
        id=answer_id,
        created=now(),
        model=service.served.answer_name(body.model),
        choices=_score_replies(service, body.choices, scores),
        usage=Usage.of(count, 0, [state]),
    )
    return json_response(reply)


async def _scored(service: Service, body: ScoringRequest, request: Request) -> tuple[list[int], SamplingParams]:
    """Return the prompt's tokens, and parameters with those of the choices.

    Raises:
        ApiError: a field that asks for something else, or what cannot be tokenized.
    """
    params, given, arguments = body.sampling_params(), body.prompt or "", body.template_arguments()
    try:
        if body.messages is not None:
            work = partial(service.llm.texts.chat_choices, body.chat_messages(), params, arguments)
        else:
            special = body.add_special_tokens is not False
            work = partial(service.llm.texts.with_tokens, given, params, special)
        # Each text choice is tokenized with all that comes before it.
        texts = [choice for choice in body.choices if isinstance(choice, str)]
        own = sum(map(len, texts))
        size = (request.state.body_size - own) * max(len(texts), 1) + own
        prompt, params = await service.in_lane(request, size, work)
    except ValueError as error:
        field = "prompt" if body.messages is None else "messages"
        param = "choices" if str(error).startswith("choices") else field
        raise ApiError(400, str(error), param=param, code=code_of(error)) from None
    given = prompt if isinstance(prompt, str) else list(prompt)
    (tokens,) = await service.tokens(request, [given], may_be_longer=False)
    return tokens, params


def _score_replies(
    service: Service, given: Sequence[str | list[int]], scores: Sequence[ChoiceScore]
) -> list[ScoredChoice]:
    tokenizer = service.llm.tokenizer
    texts = [
        one if isinstance(one, str) else None if tokenizer is None else tokenizer.backend.decode(one) for one in given
    ]
    return [
        ScoredChoice(index, text, score.token_ids, score.logprobs, score.cumulative_logprob, score.normalized_logprob)
        for index, (text, score) in enumerate(zip(texts, scores, strict=True))
    ]
