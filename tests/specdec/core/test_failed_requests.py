"""Requests that fail without affecting others."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from specdec import LLM, RequestOutput, SamplingParams
from specdec.core.outputs import CompletionOutput
from tests.specdec.core.tiny_llm import RULES, VOCAB, at_rest, load, name
from tests.specdec.tiny_checkpoints import Tiny

# Its row of the embedding is NaN in the `poisoned` checkpoint.
POISON = VOCAB - 1


@pytest.fixture(scope="module")
def poisoned(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the tiny target, changed so that every state that depends on the token `POISON` is NaN."""
    folder = tmp_path_factory.mktemp("poisoned") / "target"
    shutil.copytree(tiny.target, folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    # Nor is it ever among the likeliest, so that neither the others nor their drafts come upon it.
    weights["lm_head.weight"][POISON] = weights["lm_head.weight"].mean(0)
    save_file(weights, file, {"format": "pt"})
    assert json.loads((folder / "config.json").read_text()).get("tie_word_embeddings") is False
    return folder


NO_TOKEN_CAN = (
    "no token can follow: the model's logits are not finite, or structured_outputs, allowed_token_ids, bad_words "
    "and min_tokens together forbid every token"
)


@pytest.fixture(params=[(rule, head) for rule in RULES for head in (True, False)], ids=str)
def engine(request: pytest.FixtureRequest, tiny: Tiny, poisoned: Path) -> Iterator[LLM]:
    """Every acceptance rule with and without drafts; nothing may be left behind."""
    rule, head = request.param
    llm = load(poisoned, tiny.head if head else None, verify=rule)
    yield llm
    assert at_rest(llm)


def failed(sample: CompletionOutput, tokens: list[int]) -> None:
    """See that it failed after these tokens."""
    assert (sample.finish_reason, sample.stop_reason, sample.error) == ("error", None, NO_TOKEN_CAN)
    assert sample.token_ids == tokens
    assert len(sample.accepted) == len(tokens)


OTHERS: list[tuple[list[int], SamplingParams]] = [
    ([5, 6, 7], SamplingParams(temperature=0, max_tokens=18, ignore_eos=True)),
    ([8, 9], SamplingParams(seed=4, n=2, max_tokens=18, ignore_eos=True, logprobs=2, prompt_logprobs=1)),
    ([10, 11, 12, 13], SamplingParams(seed=5, top_p=0.9, min_p=0.01, presence_penalty=1.0, max_tokens=9)),
]


def told(output: RequestOutput) -> list[tuple[object, ...]]:
    return [
        (sample.token_ids, sample.text, sample.finish_reason, sample.error, sample.stats, sample.cumulative_logprob)
        for sample in output.outputs
    ]


def beside_others(llm: LLM, prompt: list[int], params: SamplingParams) -> RequestOutput:
    """Run it amid others, which must come out as they do alone."""
    prompts = [prompt for prompt, _ in OTHERS]
    every = [params for _, params in OTHERS]
    alone = llm.generate(prompts, every)
    first, bad, *rest = llm.generate([prompts[0], prompt, *prompts[1:]], [every[0], params, *every[1:]])
    assert [told(output) for output in (first, *rest)] == [told(output) for output in alone]
    assert not any(sample.error for output in alone for sample in output.outputs)
    assert at_rest(llm)
    return bad


@pytest.mark.long
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(seed=1),
        SamplingParams(seed=1, top_k=3, top_p=0.5, min_p=0.1),
        SamplingParams(seed=1, n=3, frequency_penalty=1.0),
        SamplingParams(temperature=0, logprobs=2, prompt_logprobs=2),
    ],
    ids=repr,
)
def test_a_prompt_that_gives_no_finite_logits_fails_alone(engine: LLM, params: SamplingParams) -> None:
    output = beside_others(engine, [5, POISON, 6], params)
    assert output.finished
    assert len(output.outputs) == params.n
    for sample in output.outputs:
        failed(sample, [])
        assert (sample.text, sample.stats.steps) == ("", 0)
        assert sample.logprobs == (None if params.logprobs is None else [])
        assert sample.cumulative_logprob == (None if params.logprobs is None else 0)
    if params.prompt_logprobs is not None:
        assert len(output.prompt_logprobs or []) == 3


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_that_spoils_what_follows_ends_the_output(engine: LLM, temperature: float) -> None:
    """The tokens before the row of NaN stay."""
    params = SamplingParams(temperature=temperature, seed=6, logprobs=1, logit_bias={POISON: 100.0})
    output = beside_others(engine, [5, 6], params).outputs[0]
    failed(output, [POISON])
    assert output.text == name(POISON)
    assert [next(iter(entries)) for entries in output.logprobs or []] == [POISON]
    assert (output.stats.steps, output.stats.tokens) == (1, 0)


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidding_every_token_fails_alone(engine: LLM, temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature, seed=1, allowed_token_ids=[5, 6], bad_words=[name(5), name(6)], logprobs=1
    )
    output = beside_others(engine, [7, 8], params)
    failed(output.outputs[0], [])


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidding_every_token_from_some_place_on(engine: LLM, temperature: float) -> None:
    """After two tokens nothing is left: 5 must be followed by 6, and 6 by nothing."""
    words = [name(5) * 2, name(6) + name(5), name(6) * 2]
    params = SamplingParams(
        temperature=temperature, seed=1, allowed_token_ids=[5, 6], bad_words=words, logit_bias={6: -100.0}, logprobs=0
    )
    output = beside_others(engine, [7, 8], params).outputs[0]
    failed(output, [5, 6])
    assert output.text == name(5) + name(6)
    assert [list(entries) for entries in output.logprobs or []] == [[5], [6]]


@pytest.mark.long
def test_only_the_end_token_before_it_may_come(engine: LLM) -> None:
    params = SamplingParams(temperature=0, allowed_token_ids=[2], min_tokens=1)
    failed(beside_others(engine, [7, 8], params).outputs[0], [])
    allowed = SamplingParams(temperature=0, allowed_token_ids=[2])
    assert engine.generate([[7, 8]], allowed)[0].finish_reason == "stop"


def test_a_stream_tells_of_a_failure_once_and_goes_on(engine: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    states = list(engine.stream([[POISON], [5, 6]], params))
    bad = [state for state in states if state.prompt_token_ids == [POISON]]
    assert len(bad) == 1
    assert bad[0].finished
    failed(bad[0].outputs[0], [])
    assert states[-1].token_ids == engine.generate([[5, 6]], params)[0].token_ids
    assert len(states[-1].token_ids) == 8


@pytest.mark.parametrize("step_tokens", [64, 16])
def test_values_that_were_not_finite_are_not_found_again(tiny: Tiny, step_tokens: int) -> None:
    """A fault that passes fails the request that meets it, and none that begins alike."""
    llm = load(tiny.target, tiny.head, max_num_seqs=4, max_num_batched_tokens=step_tokens)
    params, prompt = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), [5, 6, 7] * 13
    expected = load(tiny.target, tiny.head).generate([prompt], params)[0].token_ids
    weights = llm.model.embed_tokens.weight
    before, weights[6] = weights[6].clone(), float("nan")
    failed(llm.generate([prompt], params)[0].outputs[0], [])
    weights[6] = before
    later = llm.generate([prompt, [*prompt, 8]], params)
    assert later[0].token_ids == expected
    assert not later[1].outputs[0].error
    assert at_rest(llm)


@pytest.mark.long
def test_memory_of_a_failed_request_serves_the_next(tiny: Tiny, poisoned: Path) -> None:
    """Its cache entries are NaN, and the next holder of the blocks must not read them."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = load(poisoned, tiny.head).generate([[5, 6, 7]], params)[0].token_ids
    llm = load(poisoned, tiny.head, max_num_seqs=1, max_model_len=64)
    for _ in range(3):
        failing, fine = llm.generate([[POISON] * 60, [5, 6, 7]], [SamplingParams(temperature=0, max_tokens=4), params])
        failed(failing.outputs[0], [])
        assert fine.token_ids == expected
    assert at_rest(llm)
