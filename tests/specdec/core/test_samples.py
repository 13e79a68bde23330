"""Several samples of a prompt."""

import itertools

import pytest

from specdec import LLM, DraftShape, SamplingParams
from tests.specdec.core.tiny_llm import RULES, at_rest, load, several
from tests.specdec.tiny_checkpoints import CHARACTERS, Tiny


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
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
