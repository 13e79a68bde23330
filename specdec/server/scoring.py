"""`/v1/score_choices`."""

from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request, Response

from specdec.core.choices import ChoiceScore
from specdec.core.sampling_params import SamplingParams
from specdec.openai.errors import ApiError, code_of
from specdec.openai.replies import ChoiceScores, ScoredChoice, Usage, json_response, now
from specdec.openai.scoring_request import ScoringRequest
from specdec.server.json_route import JsonRoute
from specdec.server.openapi import answers
from specdec.server.service import Service, service_of

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/score_choices", responses=answers(ChoiceScores))
async def score_choices(body: ScoringRequest, request: Request) -> Response:
    """Return the log-probabilities of given continuations of a prompt, scored in one pass."""
    service = service_of(request).accept(body, body.model)
    tokens, params = await _tokens(service, body, request)
    answer_id = f"score-{request.state.request_id}"
    states = service.run(answer_id, [tokens], params, request, body)
    (state,) = await service.final(request, states, 1)
    scores = state.choices or []
    count = len(tokens) + sum(len(score.token_ids) for score in scores)
    reply = ChoiceScores(
        id=answer_id,
        created=now(),
        model=service.served.answer_name(body.model),
        choices=_replies(service, body.choices, scores),
        usage=Usage.of(count, 0, [state]),
    )
    return json_response(reply)


async def _tokens(service: Service, body: ScoringRequest, request: Request) -> tuple[list[int], SamplingParams]:
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


def _replies(service: Service, given: Sequence[str | list[int]], scores: Sequence[ChoiceScore]) -> list[ScoredChoice]:
    tokenizer = service.llm.tokenizer
    texts = [
        one if isinstance(one, str) else None if tokenizer is None else tokenizer.backend.decode(one) for one in given
    ]
    return [
        ScoredChoice(index, text, score.token_ids, score.logprobs, score.cumulative_logprob, score.normalized_logprob)
        for index, (text, score) in enumerate(zip(texts, scores, strict=True))
    ]
