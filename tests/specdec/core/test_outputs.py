"""Outputs: several samples, log-probabilities, and requests that fail without affecting others."""

import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from specdec import LLM, DraftShape, RequestOutput, SamplingParams
from specdec.core.outputs import CompletionOutput
from specdec.verify.sampling import Context, Sampling
from specdec.verify.transforms import NodeRows, processed_logits
from tests.kernel_sets import TORCH
from tests.specdec.tiny_checkpoints import CHARACTERS, Tiny

VOCAB = 3 + len(CHARACTERS)
RULES = ["coupled", "rejection", "block"]
SHAPE = DraftShape(3, 4, 10)
WARM = SamplingParams(seed=11, max_tokens=14, ignore_eos=True)
# Its row of the embedding is NaN in the `poisoned` checkpoint.
POISON = VOCAB - 1


def load(folder: Path, head: Path | None, **settings: object) -> LLM:
    return LLM(folder, head, dtype="float64", device="cpu", **{"shape": SHAPE, "adaptive_drafts": False, **settings})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def llm(tiny: Tiny) -> LLM:
    return load(tiny.target, tiny.head)


@pytest.fixture(scope="module")
def target(tiny: Tiny) -> Callable[[list[int]], Tensor]:
    """Logits `[tokens, vocab]` of the tiny model, by transformers."""
    model = LlamaForCausalLM.from_pretrained(tiny.target, dtype=torch.float64).eval()

    def logits(tokens: list[int]) -> Tensor:
        with torch.inference_mode():
            scores: Tensor = model(torch.tensor([tokens])).logits[0]
        return scores

    return logits


def several(count: int, **changes: object) -> SamplingParams:
    return SamplingParams(**{"n": count, "seed": 11, "max_tokens": 14, "ignore_eos": True, **changes})  # type: ignore[arg-type]


def at_rest(llm: LLM) -> bool:
    """Return whether no request has left anything behind."""
    scheduler = llm.engine.scheduler
    return not llm.engine.has_unfinished and scheduler.stats().kv_usage == 0


# Several samples of a prompt.


def test_samples_are_numbered_and_differ(llm: LLM) -> None:
    (output,) = llm.generate("Hello", several(4))
    assert [sample.index for sample in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 4
    assert len({sample.text for sample in output.outputs}) == 4
    assert (output.prompt, output.finished) == ("Hello", True)
    assert at_rest(llm)


def test_the_first_of_several_is_the_only_one_of_one(llm: LLM) -> None:
    (many,), (one,) = llm.generate("Hello", several(3)), llm.generate("Hello", several(1))
    assert len(one.outputs) == 1
    assert many.outputs[0].token_ids == one.outputs[0].token_ids
    assert (many.token_ids, many.text, many.finish_reason, many.stats) == (
        many.outputs[0].token_ids,
        many.outputs[0].text,
        many.outputs[0].finish_reason,
        many.outputs[0].stats,
    )


def test_a_sample_does_not_depend_on_what_runs_beside_it(llm: LLM, tiny: Tiny) -> None:
    expected = [sample.token_ids for sample in llm.generate("Hello", several(5))[0].outputs]
    assert [sample.token_ids for sample in llm.generate("Hello", several(2))[0].outputs] == expected[:2]
    params = [several(3, seed=4), several(5), SamplingParams(temperature=0, max_tokens=3)]
    crowded = llm.generate(["Good day", "Hello", "x"], params)
    assert [sample.token_ids for sample in crowded[1].outputs] == expected
    # Two seats for five samples: they run one after the other.
    for other in (load(tiny.target, tiny.head, max_num_seqs=2), load(tiny.target, None)):
        assert [sample.token_ids for sample in other.generate("Hello", several(5))[0].outputs] == expected


def test_seeds_and_samples_are_not_mixed_up(llm: LLM) -> None:
    first, second = (llm.generate("Hello", several(2, seed=seed))[0].outputs for seed in (11, 12))
    assert len({tuple(sample.token_ids) for sample in (*first, *second)}) == 4


def test_without_a_seed_each_run_draws_one(llm: LLM) -> None:
    first, second = (llm.generate("Hello", several(2, seed=None))[0].outputs for _ in range(2))
    assert len({tuple(sample.token_ids) for sample in (*first, *second)}) == 4


@pytest.mark.parametrize("verify", RULES)
def test_figures_belong_to_the_sample(tiny: Tiny, verify: str) -> None:
    llm = load(tiny.target, tiny.head, verify=verify, shape=DraftShape(2, 48, 64))
    (output,) = llm.generate("Hello", several(3, max_tokens=24))
    assert len({id(sample.stats) for sample in output.outputs}) == 3
    for sample in output.outputs:
        stats = sample.stats
        # The first token comes from the prompt's own pass.
        assert stats.tokens == len(sample.token_ids) - 1 == 23
        assert sum(stats.accepted_per_depth) == sum(sample.accepted)
        assert stats.steps + sum(sample.accepted) == 23
    if verify == "coupled":
        assert any(any(sample.accepted) for sample in output.outputs)


def test_every_state_of_a_stream_holds_all_samples(llm: LLM) -> None:
    # Samples of unequal length: each ends after its own first vowel.
    params = several(3, stop_token_ids=[3 + CHARACTERS.index(letter) for letter in "aeiou"], max_tokens=40)
    (expected,) = llm.generate("Hello", params)
    assert len({len(sample.token_ids) for sample in expected.outputs}) > 1
    states = list(llm.stream(["Hello"], params))
    shown = ["", "", ""]
    for state in states:
        assert [sample.index for sample in state.outputs] == [0, 1, 2]
        for sample in state.outputs:
            shown[sample.index] += "".join(segment.text for segment in sample.segments)
            # A state keeps the figures of its own time.
            assert sample.stats.tokens == max(0, len(sample.token_ids) - 1)
    assert shown == [sample.text for sample in expected.outputs]
    assert [sample.token_ids for sample in states[-1].outputs] == [sample.token_ids for sample in expected.outputs]
    # Finished with its last sample, not with its first.
    assert [state.finished for state in states] == [False] * (len(states) - 1) + [True]
    assert any(sample.finish_reason for sample in states[-2].outputs)
    for before, after in itertools.pairwise(states):
        for old, new in zip(before.outputs, after.outputs, strict=True):
            assert new.token_ids[: len(old.token_ids)] == old.token_ids


def test_closing_a_stream_ends_all_samples(llm: LLM) -> None:
    stream = llm.stream(["Hello", "x"], several(3))
    state = next(stream)
    assert len(state.outputs) == 3
    stream.close()
    assert at_rest(llm)


# Log-probabilities.


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


def name(token: int) -> str:
    return ["<unk>", "<s>", "</s>", *CHARACTERS][token]


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


def test_prompt_logprobs_of_some_in_a_batch(llm: LLM) -> None:
    params = [WARM, several(3, prompt_logprobs=1), WARM]
    # Once a prompt, not once a sample.
    asked = [request.params.prompt_logprobs for request in llm.new_group(PROMPT, params[1]).requests]
    assert asked == [1, None, None]
    outputs = llm.generate(["Hello", PROMPT, PROMPT], params)
    assert [output.prompt_logprobs is None for output in outputs] == [True, False, True]
    assert_alike(outputs[1].prompt_logprobs, llm.generate(PROMPT, several(1, prompt_logprobs=1))[0].prompt_logprobs)


def test_a_prompt_of_one_token_has_nothing_to_tell(llm: LLM) -> None:
    assert llm.generate([5], SamplingParams(prompt_logprobs=2, max_tokens=3))[0].prompt_logprobs == [None]


# Requests that fail.


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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_that_spoils_what_follows_ends_the_output(engine: LLM, temperature: float) -> None:
    """The tokens before the row of NaN stay."""
    params = SamplingParams(temperature=temperature, seed=6, logprobs=1, logit_bias={POISON: 100.0})
    output = beside_others(engine, [5, 6], params).outputs[0]
    failed(output, [POISON])
    assert output.text == name(POISON)
    assert [next(iter(entries)) for entries in output.logprobs or []] == [POISON]
    assert (output.stats.steps, output.stats.tokens) == (1, 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidding_every_token_fails_alone(engine: LLM, temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature, seed=1, allowed_token_ids=[5, 6], bad_words=[name(5), name(6)], logprobs=1
    )
    output = beside_others(engine, [7, 8], params)
    failed(output.outputs[0], [])


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
