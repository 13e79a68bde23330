"""Routes of conversations: `/v1/chat/completions`, `/v1/responses`, and Anthropic's `/v1/messages`."""

from collections.abc import Callable
from typing import TypeVar

from fastapi import APIRouter, Request, Response

from specdec.core.sampling_params import SamplingParams
from specdec.openai.chat_answer import ChatAnswer
from specdec.openai.chat_request import ChatRequest, content_text
from specdec.openai.errors import ApiError
from specdec.openai.messages_answer import InputTokens, MessageReply, MessagesAnswer
from specdec.openai.messages_request import MessagesRequest
from specdec.openai.replies import ChatCompletion, json_response
from specdec.openai.responses_answer import ResponseReply, ResponsesAnswer
from specdec.openai.responses_request import ResponsesRequest
from specdec.openai.served_model import ServedModel
from specdec.server.json_route import JsonRoute
from specdec.server.openapi import answers
from specdec.server.service import AnswerMaker, service_of

router = APIRouter(route_class=JsonRoute)
Body = TypeVar("Body", ChatRequest, ResponsesRequest)


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
