"""Routes beside the generation of text: models and adapters, tokens, health, abort, update of the draft, metrics."""

from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from specdec import __version__
from specdec.openai.errors import ApiError
from specdec.openai.operation_requests import (
    AbortRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
    UpdateDraftRequest,
)
from specdec.openai.replies import (
    Aborted,
    Detokenized,
    DraftUpdate,
    ModelCard,
    ModelList,
    Tokenized,
    Version,
    json_response,
)
from specdec.server.json_route import JsonRoute
from specdec.server.openapi import ERRORS, answers
from specdec.server.service import Service, service_of

router = APIRouter(route_class=JsonRoute)
# Tokens that /detokenize takes, or as many as the context holds: decoding lets no other thread run.
MOST_TOKENS = 1 << 17


@router.get("/v1/models", responses=answers(ModelList))
async def list_models(request: Request) -> Response:
    """List the names of the model, then those of its adapters."""
    service = service_of(request)
    names = [*service.served.names, *(adapter.lora_name for adapter in service.adapters.all())]
    return json_response(ModelList(data=[_card(service, name) for name in names]))


@router.get("/v1/models/{name:path}", responses=answers(ModelCard))
async def retrieve_model(name: str, request: Request) -> Response:
    """Describe the model or an adapter."""
    service = service_of(request)
    if name not in service.served.names and service.adapters.get(name) is None:
        raise ApiError(404, f"the model {name!r} is not served", param="model", code="model_not_found")
    return json_response(_card(service, name))


def _card(service: Service, name: str) -> ModelCard:
    adapter, model, longest = service.adapters.get(name), service.served.names[0], service.llm.max_model_len
    root, parent = (model, None) if adapter is None else (adapter.lora_path, model)
    return ModelCard(id=name, created=service.started, root=root, parent=parent, max_model_len=longest)


@router.post("/tokenize", responses=answers(Tokenized))
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Return the tokens of a prompt or of a conversation."""
    service = service_of(request).accept(body, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    if body.messages is not None:
        tokens = await service.chat_tokens(request, body.chat_messages(), body.template_arguments())
    else:
        body.check_prompt()
        (tokens,) = await service.tokens(request, [body.prompt or ""], body.add_special_tokens is not False)
    reply = Tokenized(len(tokens), service.llm.max_model_len, tokens)
    if body.return_token_strs:
        reply.token_strs = await service.in_lane(request, request.state.body_size, partial(_names, service, tokens))
    return json_response(reply)


def _names(service: Service, tokens: Sequence[int]) -> list[str]:
    return [service.served.needed_tokenizer.backend.id_to_token(token) or "" for token in tokens]


@router.post("/detokenize", responses=answers(Detokenized))
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Return the text of tokens, special ones included."""
    service = service_of(request).accept(body, body.model)
    tokenizer, given = service.served.needed_tokenizer.backend, body.tokens
    most = max(service.llm.max_model_len, MOST_TOKENS)
    if len(given) > most:
        raise ApiError(400, f"tokens holds {len(given)}; it may hold at most {most}", param="tokens")
    size = tokenizer.get_vocab_size()
    if given and (min(given) < 0 or max(given) >= size):
        wrong = next(token for token in given if not 0 <= token < size)
        raise ApiError(400, f"tokens holds {wrong}; token ids lie between 0 and {size - 1}", param="tokens")
    work = partial(tokenizer.decode, given, skip_special_tokens=False)
    return json_response(Detokenized(await service.in_lane(request, request.state.body_size, work)))


@router.post("/abort", responses=answers(Aborted))
async def abort(body: AbortRequest, request: Request) -> Response:
    """Abort a running request by the id of its answer, or by its X-Request-Id."""
    service = service_of(request).accept(body, None)
    return json_response(Aborted(await service.abort(body.request_id)))


@router.post("/update_draft", responses=answers(DraftUpdate))
async def update_draft(body: UpdateDraftRequest, request: Request) -> Response:
    """Replace the draft head between two steps. No output changes."""
    service = service_of(request).accept(body, None)
    return json_response(DraftUpdate(await service.update_draft(body.draft)))


@router.post("/v1/load_lora_adapter", response_class=PlainTextResponse, responses=ERRORS)
async def load_lora_adapter(body: LoadAdapterRequest, request: Request) -> Response:
    """Serve an adapter, which requests name as their model."""
    service = service_of(request).accept(body, None)
    await service.adapters.load(body.lora_name, body.lora_path, body.draft_lora_path, bool(body.load_inplace))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse, responses=ERRORS)
async def unload_lora_adapter(body: UnloadAdapterRequest, request: Request) -> Response:
    """Serve an adapter no longer. Requests that have it run to their end."""
    service = service_of(request).accept(body, None)
    await service.adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@router.get("/health", response_class=Response, responses=ERRORS)
async def health(request: Request) -> Response:
    """Tell whether the engine runs: 200, or 503."""
    if not service_of(request).llm.healthy:
        raise ApiError(503, "the engine is not running; it is being restarted, or has failed for good")
    return Response()


@router.get("/ping", response_class=Response, responses=ERRORS)
@router.post("/ping", response_class=Response, responses=ERRORS)
async def ping(request: Request) -> Response:
    """Answer as `/health` does; Amazon SageMaker asks here."""
    return await health(request)


@router.get("/version", responses=answers(Version))
async def version() -> Response:
    """Return the version of this package."""
    return json_response(Version(__version__))


@router.get("/metrics", response_class=PlainTextResponse, responses=ERRORS)
async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' text format."""
    page = await service_of(request).metrics_page()
    return Response(page, headers={"Content-Type": CONTENT_TYPE_LATEST})
