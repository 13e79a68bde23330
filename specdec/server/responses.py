"""`/v1/responses`."""

from fastapi import APIRouter, Request, Response

from specdec.openai.connection import while_connected
from specdec.openai.replies import json_response
from specdec.openai.responses_answer import ResponsesAnswer
from specdec.openai.responses_replies import ResponseReply
from specdec.openai.responses_request import ResponsesRequest
from specdec.server.json_route import JsonRoute
from specdec.server.openapi import answers
from specdec.server.service import service_of

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/responses", responses=answers(ResponseReply, may_stream=True))
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation. Answers are not stored."""
    service = service_of(request)
    service.accept(body, body.model)
    body.check_response(service.settings.max_logprobs)
    service.check_tools(body.calls.mode == "auto")
    limit = body.max_tokens if body.max_output_tokens is None else body.max_output_tokens
    params = body.sampling_params(
        {"max_tokens": None, **service.defaults},
        body.forced_calls(service.served.tool_parser, service.tool_tags),
        max_tokens=limit,
        logprobs=body.num_logprobs,
    )
    if body.truncation == "auto":
        params.truncate_prompt_tokens = -1
    service.leave_room(params)
    seconds, is_truncated = service.settings.request_timeout, params.truncate_prompt_tokens is not None
    arguments = body.template_arguments()
    work = service.chat_tokens(request, body.messages(), arguments, "input", may_be_longer=is_truncated)
    prompt = await service.tokenized(request, work)
    service.begin_thinking(params, prompt, arguments)
    answer_id = f"resp-{request.state.request_id}"
    answer = ResponsesAnswer(answer_id, service.served, body, params)
    states = service.run(answer_id, [prompt], params, request, body, "input")
    if body.stream:
        return service.stream(answer.events(states), answer.error_event)
    (state,) = await while_connected(request.receive, service.final(states, 1), seconds)
    return json_response(answer.whole(state))
