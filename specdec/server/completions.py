"""`/v1/completions`."""

from fastapi import APIRouter, Request, Response

from specdec.core.sampling_params import SamplingParams
from specdec.openai.completion_answer import CompletionAnswer
from specdec.openai.completion_request import CompletionRequest
from specdec.openai.replies import Completion
from specdec.server.json_route import JsonRoute
from specdec.server.openapi import answers
from specdec.server.service import Service, service_of

router = APIRouter(route_class=JsonRoute)
# OpenAI's and vLLM's.
DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions", responses=answers(Completion, may_stream=True))
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue prompts."""
    service = service_of(request).accept(body, body.model)
    body.check_supported(service.settings.max_logprobs)
    given, params = body.prompts(), _params(body, service)
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


def _params(body: CompletionRequest, service: Service) -> SamplingParams:
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
