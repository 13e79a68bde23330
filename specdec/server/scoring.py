"""`/v1/score_choices`."""

import asyncio
from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from specdec.core.choices import ChoiceScore
from specdec.engine.choice_prompts import with_choice_tokens
from specdec.server.connection import while_connected
from specdec.server.errors import bad_request
from specdec.server.json_route import JsonRoute
from specdec.server.openapi import answers
from specdec.server.replies import ChoiceScores, ScoredChoice, Usage, json_response, now
from specdec.server.scoring_request import ScoringRequest
from specdec.server.service import Service, service_of

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/score_choices", responses=answers(ChoiceScores))
async def score_choices(body: ScoringRequest, request: Request) -> Response:
    """Return the log-probabilities of given continuations of a prompt, scored in one pass."""
    service = service_of(request)
    service.accept(body, body.model)
    params = body.sampling_params()
    if body.messages is not None:
        given: str | list[int] = await service.chat_tokens(body.conversation(), body.template_arguments())
    else:
        given = body.prompt or ""
    try:
        # Each choice is tokenized together with a text prompt, which may take time.
        prompt, params = await asyncio.to_thread(with_choice_tokens, given, params, service.llm.tokenizer)
    except ValueError as error:
        raise bad_request(error, ("choices",)) from None
    tokens = await service.tokens(list(prompt) if not isinstance(prompt, str) else prompt)
    answer_id = f"score-{request.state.request_id}"
    states = service.run(answer_id, [tokens], params, request.headers, body)
    (state,) = await while_connected(request.receive, service.final(states, 1), service.settings.request_timeout)
    scores = state.choices or []
    count = len(tokens) + sum(len(score.token_ids) for score in scores)
    reply = ChoiceScores(
        id=answer_id,
        created=now(),
        model=service.names[0],
        choices=_replies(service, body.choices, scores),
        usage=Usage.of(count, 0),
    )
    return json_response(reply)


def _replies(service: Service, given: Sequence[str | list[int]], scores: Sequence[ChoiceScore]) -> list[ScoredChoice]:
    tokenizer = service.llm.tokenizer
    texts = [
        one if isinstance(one, str) else None if tokenizer is None else tokenizer.backend.decode(one) for one in given
    ]
    return [
        ScoredChoice(
            index=index,
            text=text,
            token_ids=score.token_ids,
            token_logprobs=score.logprobs,
            cumulative_logprob=score.cumulative_logprob,
            normalized_logprob=score.normalized_logprob,
        )
        for index, (text, score) in enumerate(zip(texts, scores, strict=True))
    ]
