"""Log-probabilities of outputs and prompts."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import LLM, DraftShape, SamplingParams
from specdec.core import logprobs
from specdec.verify.sampling import Context, Sampling
from specdec.verify.transforms import NodeRows, processed_logits
from tests.kernel_sets import TORCH
from tests.new_groups import new_group
from tests.specdec.core.tiny_llm import RULES, VOCAB, WARM, load, name, several
from tests.specdec.tiny_checkpoints import Tiny


def close(values: object, expected: object) -> bool:
    return bool(values == pytest.approx(expected, rel=1e-9, abs=1e-9))


def assert_alike(found: list[Any] | None, expected: list[Any] | None) -> None:
    """Equal but for how sums are rounded in batches of other shapes."""
    assert len(found or []) == len(expected or []) > 0
    for one, other in zip(found or [], expected or [], strict=True):
        assert list(one or {}) == list(other or {})
        for token, entry in (one or {}).items():
            assert entry.rank == other[token].rank
            assert close(entry.logprob, other[token].logprob)


def check_entries(
    entries: dict[int, object], token: int, logprobs: Tensor, count: int, decoded: Callable[[int], str | None]
) -> None:
    """One place's entries against the distribution `[vocab]`."""
    order = sorted(range(VOCAB), key=lambda other: -float(logprobs[other]))
    assert set(entries) == {token, *order[:count]}
    for other, entry in entries.items():
        assert entry.rank == 1 + order.index(other)  # type: ignore[attr-defined]
        assert close(entry.logprob, float(logprobs[other]))  # type: ignore[attr-defined]
        assert entry.decoded_token == decoded(other)  # type: ignore[attr-defined]
    assert next(iter(entries)) == token


@pytest.mark.long
@pytest.mark.parametrize("count", [0, 1, 4])
@pytest.mark.parametrize("verify", RULES)
def test_logprobs_of_the_likeliest_and_the_own(
    tiny: Tiny, target: Callable[[list[int]], Tensor], count: int, verify: str
) -> None:
    llm = load(tiny.target, tiny.head, verify=verify, shape=DraftShape(2, 48, 64))
    # What is asked of sampling does not show: these are the model's own.
    params = SamplingParams(temperature=0.8, seed=3, logprobs=count, max_tokens=14, presence_penalty=1.5, top_k=60)
    output = llm.generate([5, 6, 7], params)[0].outputs[0]
    own = torch.log_softmax(target([5, 6, 7, *output.token_ids]), -1)[2:]
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids) > 2
    for token, entries, row in zip(output.token_ids, output.logprobs, own, strict=False):
        check_entries(entries, token, row, count, name)  # type: ignore[arg-type]
    total = sum(float(row[token]) for token, row in zip(output.token_ids, own, strict=False))
    assert close(output.cumulative_logprob, total)


def test_logprobs_of_the_whole_vocabulary(llm: LLM) -> None:
    output = llm.generate([5, 6, 7], SamplingParams(seed=3, logprobs=-1, prompt_logprobs=-1, max_tokens=4))[0]
    places = [*(output.outputs[0].logprobs or []), *(output.prompt_logprobs or [])[1:]]
    assert len(places) == len(output.token_ids) + 2
    for entries in places:
        assert entries is not None
        assert set(entries) == set(range(VOCAB))
        assert sorted(entry.rank for entry in entries.values()) == list(range(1, VOCAB + 1))
        assert close(sum(math.exp(entry.logprob) for entry in entries.values()), 1)


def test_there_are_none_unless_asked_for(llm: LLM) -> None:
    (output,) = llm.generate([5, 6, 7], WARM)
    assert (output.prompt_logprobs, output.outputs[0].logprobs, output.outputs[0].cumulative_logprob) == (None,) * 3


def test_logprobs_do_not_change_the_output(llm: LLM) -> None:
    plain = llm.generate("Hello", several(2))[0]
    told = llm.generate("Hello", several(2, logprobs=3, prompt_logprobs=3))[0]
    assert [sample.token_ids for sample in told.outputs] == [sample.token_ids for sample in plain.outputs]


# As many as log-probabilities are asked for, so that what an accepted token does to its own chance shows.
ALLOWED = (5, 6, 7, 8, 9)


@pytest.mark.long
def test_raw_and_processed_logprobs(tiny: Tiny, target: Callable[[list[int]], Tensor]) -> None:
    params = SamplingParams(
        temperature=0.7, min_p=1e-9, frequency_penalty=2.0, allowed_token_ids=ALLOWED, seed=8, logprobs=5, max_tokens=14
    )
    shape = DraftShape(2, 48, 64)
    raw, processed = (
        load(tiny.target, tiny.head, shape=shape, logprobs_mode=mode).generate([5, 6, 7], params)[0].outputs[0]
        for mode in ("raw_logprobs", "processed_logprobs")
    )
    assert raw.token_ids == processed.token_ids
    # Some rows are those of accepted nodes, below which the penalty counts the nodes above.
    assert any(raw.accepted)
    logits = target([5, 6, 7, *raw.token_ids])[2:-1]
    sampling = Sampling(temperature=0.7, min_p=1e-9, frequency_penalty=2.0, allowed_token_ids=ALLOWED)
    assert raw.logprobs is not None
    assert processed.logprobs is not None
    for place, token in enumerate(raw.token_ids):
        check_entries(raw.logprobs[place], token, torch.log_softmax(logits[place], -1), 5, name)  # type: ignore[arg-type]
        context = Context(sampling, [5, 6, 7, *raw.token_ids[:place]], 3)
        nodes = NodeRows(context, 1, lambda: torch.empty(1, 0, dtype=torch.int64))
        scores = processed_logits(logits[place : place + 1], [nodes], TORCH)[0]
        check_entries(processed.logprobs[place], token, torch.log_softmax(scores, -1), 5, name)  # type: ignore[arg-type]
        # All that is allowed, and they share the whole of the probability.
        kept = [math.exp(entry.logprob) for entry in processed.logprobs[place].values()]
        assert close(sum(kept), 1)
        assert len(kept) == 5


@pytest.mark.long
def test_logprobs_end_with_the_output(tiny: Tiny) -> None:
    """A step may accept more than the output keeps."""
    llm = load(tiny.target, tiny.head, shape=DraftShape(2, 48, 64))
    free = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))[0].outputs[0]
    assert any(free.accepted)
    for token in set(free.token_ids):
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1, stop_token_ids=[token])
        output = llm.generate("Hello", params)[0].outputs[0]
        assert output.logprobs is not None
        assert [next(iter(entries)) for entries in output.logprobs] == output.token_ids


def test_logprobs_grow_with_the_stream(llm: LLM) -> None:
    for state in llm.stream(["Hello"], several(2, logprobs=1)):
        for sample in state.outputs:
            assert len(sample.logprobs or []) == len(sample.token_ids)
            own = [
                entries[token].logprob for entries, token in zip(sample.logprobs or [], sample.token_ids, strict=True)
            ]
            assert close(sample.cumulative_logprob, sum(own))


def test_without_a_tokenizer_entries_have_no_text(tiny: Tiny) -> None:
    output = load(tiny.bare, None).generate([5, 6], SamplingParams(seed=1, logprobs=2, prompt_logprobs=2))[0]
    entries = [*(output.outputs[0].logprobs or []), (output.prompt_logprobs or [])[1] or {}]
    assert {entry.decoded_token for row in entries for entry in row.values()} == {None}


PROMPT = "The first of them is a prompt of some length."


@pytest.mark.parametrize("count", [0, 2])
def test_prompt_logprobs_are_the_models_own(llm: LLM, target: Callable[[list[int]], Tensor], count: int) -> None:
    params = SamplingParams(temperature=0.5, seed=1, top_k=1, logit_bias={9: 50.0}, prompt_logprobs=count, max_tokens=3)
    (output,) = llm.generate(PROMPT, params)
    rows = torch.log_softmax(target(output.prompt_token_ids), -1)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for place, entries in enumerate(output.prompt_logprobs[1:], 1):
        check_entries(entries, output.prompt_token_ids[place], rows[place - 1], count, name)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [1, 2, 7, 45, 46, 47])
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_prompt_logprobs_do_not_depend_on_chunks(llm: LLM, tiny: Tiny, budget: int, mode: str) -> None:
    params = SamplingParams(temperature=0.5, seed=1, top_k=1, prompt_logprobs=2, max_tokens=3)
    (whole,) = llm.generate(PROMPT, params)
    small = load(tiny.target, tiny.head, max_num_seqs=1, max_num_batched_tokens=budget, logprobs_mode=mode)
    (chunked,) = small.generate(PROMPT, params)
    assert chunked.token_ids == whole.token_ids
    assert len(chunked.prompt_logprobs or []) == len(whole.prompt_logprobs or []) == len(whole.prompt_token_ids)
    assert_alike(chunked.prompt_logprobs, whole.prompt_logprobs)


def test_few_rows_of_a_prompt_are_scored_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the rows of a whole chunk would take gigabytes that no rehearsal has measured."""
    params = SamplingParams(temperature=0, prompt_logprobs=2, max_tokens=1)
    (whole,) = llm.generate(PROMPT, params)
    scored, log_softmax = list[int](), logprobs._log_softmax

    def watched(logits: Tensor) -> Tensor:
        scored.append(len(logits))
        return log_softmax(logits)

    monkeypatch.setattr(logprobs, "PROMPT_ROWS", 7)
    monkeypatch.setattr(logprobs, "_log_softmax", watched)
    assert llm.generate(PROMPT, params)[0].prompt_logprobs == whole.prompt_logprobs
    assert max(scored) == 7
    assert sum(scored) == len(whole.prompt_token_ids) - 1


def test_prompt_logprobs_of_some_in_a_batch(llm: LLM) -> None:
    params = [WARM, several(3, prompt_logprobs=1), WARM]
    # Once a prompt, not once a sample.
    asked = [request.params.prompt_logprobs for request in new_group(llm, PROMPT, params[1]).requests]
    assert asked == [1, None, None]
    outputs = llm.generate(["Hello", PROMPT, PROMPT], params)
    assert [output.prompt_logprobs is None for output in outputs] == [True, False, True]
    assert_alike(outputs[1].prompt_logprobs, llm.generate(PROMPT, several(1, prompt_logprobs=1))[0].prompt_logprobs)


def test_a_prompt_of_one_token_has_nothing_to_tell(llm: LLM) -> None:
    assert llm.generate([5], SamplingParams(prompt_logprobs=2, max_tokens=3))[0].prompt_logprobs == [None]
