"""`/v1/messages`, Anthropic's form of chat completions."""

from fastapi import APIRouter, Request, Response

from specdec.openai.connection import while_connected
from specdec.openai.errors import ApiError
from specdec.openai.messages_answer import InputTokens, MessageReply, MessagesAnswer
from specdec.openai.messages_request import MessagesRequest
from specdec.openai.replies import json_response
from specdec.server.chat import prepared_chat
from specdec.server.json_route import JsonRoute
from specdec.server.openapi import answers
from specdec.server.service import service_of

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/messages", responses=answers(MessageReply, may_stream=True))
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    service.accept(body, body.model)
    if body.max_tokens is None:
        raise ApiError(400, "max_tokens is missing; give the most tokens of the answer", param="max_tokens")
    chat = body.chat(may_think=service.served.reasoning is not None)
    prompt, params = await prepared_chat(chat, request)
    answer_id = f"msg-{request.state.request_id}"
    answer = MessagesAnswer(answer_id, service.served, chat, params)
    states = service.run(answer_id, [prompt], params, request, chat, "messages")
    seconds = service.settings.request_timeout
    if chat.stream:
        return service.stream(answer.events(states), answer.error_event)
    (state,) = await while_connected(request.receive, service.final(states, 1), seconds)
    return json_response(answer.whole(state))


@router.post("/v1/messages/count_tokens", responses=answers(InputTokens))
async def count_tokens(body: MessagesRequest, request: Request) -> Response:
    """Count the tokens of a conversation."""
    service = service_of(request)
    service.accept(body, body.model)
    chat = body.chat(may_think=service.served.reasoning is not None)
    prompt, _ = await prepared_chat(chat, request)
    return json_response(InputTokens(len(prompt)))
