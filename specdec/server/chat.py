"""`/v1/chat/completions`."""

from fastapi import APIRouter, Request, Response

from specdec.core.sampling_params import SamplingParams
from specdec.openai.chat_answer import ChatAnswer
from specdec.openai.chat_request import ChatRequest
from specdec.openai.connection import while_connected
from specdec.openai.replies import ChatCompletion, json_response
from specdec.server.json_route import JsonRoute
from specdec.server.openapi import answers
from specdec.server.service import service_of

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", responses=answers(ChatCompletion, may_stream=True))
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    service.accept(body, body.model)
    prompt, params = await prepared_chat(body, request)
    answer_id = f"chatcmpl-{request.state.request_id}"
    answer = ChatAnswer(answer_id, service.served, body, params)
    states = service.run(answer_id, [prompt], params, request, body, "messages")
    seconds = service.settings.request_timeout
    if body.stream:
        return service.stream(answer.events(states))
    (state,) = await while_connected(request.receive, service.final(states, 1), seconds)
    return json_response(answer.whole(state))


async def prepared_chat(body: ChatRequest, request: Request) -> tuple[list[int], SamplingParams]:
    """Return the tokens of a conversation, and the parameters of its answer.

    Raises:
        ApiError: what is not supported, or does not fit.
    """
    service = service_of(request)
    body.check_chat(service.settings.max_logprobs)
    service.check_tools(body.calls.mode == "auto")
    # Without a limit, an answer may go on to the end of the context.
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = body.sampling_params(
        {"max_tokens": None, **service.defaults},
        body.forced_calls(service.served.tool_parser, service.tool_tags),
        max_tokens=limit,
        logprobs=body.num_logprobs,
        prediction=None if body.prediction is None else body.prediction.text(),
    )
    service.leave_room(params)
    is_truncated, arguments = params.truncate_prompt_tokens is not None, body.template_arguments()
    work = service.chat_tokens(request, body.conversation(), arguments, may_be_longer=is_truncated)
    prompt = await service.tokenized(request, work)
    service.begin_thinking(params, prompt, arguments)
    return prompt, params
