"""What the outputs of drawn requests must be."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from specdec import LLM, SamplingParams
from specdec.core.outputs import CompletionOutput
from specdec.core.request import Request, RequestGroup
from tests.specdec import oracle
from tests.specdec.oracle import Expected
from tests.specdec.world import World


def expect(world: World, llm: LLM, request: Request, params: SamplingParams, beyond: int = 0) -> Expected:
    """The plain loop's output for a request not yet run."""
    if params.choices is not None:
        return Expected(finish_reason="stop")
    prompt = request.token_ids[: request.num_prompt]
    expected = oracle.generate(
        world.logits,
        prompt,
        params,
        request.sampling,
        end_tokens=llm.end_tokens,
        tokenizer=world.tokenizer,
        max_length=llm.max_model_len,
        processed=llm.engine.logprobs_mode == "processed_logprobs",
        beyond=beyond,
    )
    expected.rounds_either_way = lambda: world.rounds_either_way([*prompt, *expected.tokens])
    return expected


def assert_close(found: float, wanted: float, rounds_either_way: Callable[[], bool], tolerance: float = 1e-9) -> None:
    """Check a log-probability; one rounding of float32 more or less is right where transformers' own is chance."""
    if found != pytest.approx(wanted, abs=tolerance):
        assert rounds_either_way(), f"{found} is not {wanted}"
        assert found == pytest.approx(wanted, abs=2e-6)


def check(output: CompletionOutput, expected: Expected, params: SamplingParams) -> None:
    assert output.token_ids == expected.tokens
    assert output.text == expected.text
    assert (output.finish_reason, output.stop_reason) == (expected.finish_reason, expected.stop_reason)
    if params.logprobs is None:
        assert output.logprobs is None
        return
    assert output.logprobs is not None
    for token, entries, log_p in zip(output.token_ids, output.logprobs, expected.logprobs, strict=True):
        likeliest = log_p.topk(params.logprobs).indices.tolist()
        # Tokens that cannot be are alike, so which of them fill the list is not settled.
        assert {t for t in entries if log_p[t].isfinite()} == {t for t in [token, *likeliest] if log_p[t].isfinite()}
        for other, entry in entries.items():
            assert_close(entry.logprob, log_p[other].item(), expected.rounds_either_way)
        assert entries[token].rank == int((log_p >= log_p[token] - 1e-12).sum())
    total = sum(log_p[token].item() for token, log_p in zip(expected.tokens, expected.logprobs, strict=True))
    assert output.cumulative_logprob is not None
    assert_close(output.cumulative_logprob, total, expected.rounds_either_way, 1e-8)


def check_choices(group: RequestGroup, world: World) -> None:
    """Check each choice's scores against a pass over the prompt and that choice alone."""
    scores, prompt = group.output().choices, group.prompt_token_ids
    assert scores is not None
    assert [score.token_ids for score in scores] == list(group.requests[0].params.choices or ())
    for score in scores:
        whole = [*prompt, *score.token_ids]
        with torch.inference_mode():
            log_p = world.target(torch.tensor([whole])).logits[0].log_softmax(-1)
        own = [log_p[len(prompt) - 1 + place, token].item() for place, token in enumerate(score.token_ids)]
        for found, wanted in zip(score.logprobs, own, strict=True):
            assert_close(found, wanted, partial(world.rounds_either_way, whole))
        assert_close(score.cumulative_logprob, sum(own), partial(world.rounds_either_way, whole), 1e-8)


def check_prompt(group: RequestGroup, world: World, params: SamplingParams) -> None:
    if params.choices is not None:
        check_choices(group, world)
    scored = group.output().prompt_logprobs
    if params.prompt_logprobs is None:
        assert scored is None
        return
    assert scored is not None
    assert len(scored) == len(group.prompt_token_ids)
    assert scored[0] is None
    with torch.inference_mode():
        log_p = world.target(torch.tensor([group.prompt_token_ids])).logits[0].log_softmax(-1)
    for at, token in enumerate(group.prompt_token_ids[1:]):
        entries = scored[at + 1]
        assert entries is not None
        assert set(entries) == {token, *log_p[at].topk(params.prompt_logprobs).indices.tolist()}
        for other, entry in entries.items():
            assert_close(
                entry.logprob, log_p[at, other].item(), partial(world.rounds_either_way, group.prompt_token_ids)
            )
