"""The text of outputs goes on where the prompt's ends, with a tokenizer that drops the space a text begins with."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from specdec import LLM, DraftShape, SamplingParams, StructuredOutputsParams
from specdec.core.step_report import StepReporter
from tests.profiles import num_cases
from tests.specdec.metaspace_llama import TOKENIZER, VOCAB, WORD_IDS, ids, save_metaspace

WORLD = ids("▁world")[0]
CHOICES = [" cat", "cat", "s", ",", " world", " the,", "x", "true", " true s", "é", " é", "\n", "  "]
DRAWN = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True, allowed_token_ids=[*WORD_IDS, *ids("</s>")])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("metaspace") / "target"
    save_metaspace(path)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    """Room for few blocks, so that requests are preempted."""
    shape = DraftShape(3, 2, 6)
    return LLM(folder, "ngram", dtype="float64", device="cpu", shape=shape, block_size=8, kv_cache_memory=400 << 10)


def after(prompt: list[int], tokens: list[int], hides: bool = True) -> str:
    """Return the text of tokens behind a prompt, in which special tokens are hidden, or text as others."""
    before, whole = TOKENIZER.decode(prompt, hides), TOKENIZER.decode([*prompt, *tokens], hides)
    assert whole.startswith(before)
    return whole[len(before) :]


@pytest.mark.long
@settings(max_examples=num_cases(8), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompts=st.lists(st.lists(st.sampled_from(WORD_IDS), min_size=1, max_size=9), min_size=1, max_size=6))
def test_texts_of_samples(llm: LLM, prompts: list[list[int]]) -> None:
    params = SamplingParams(**{**vars(DRAWN), "n": 2, "seed": 3})
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        for sample in output.outputs:
            assert sample.text == after(prompt, sample.token_ids)


def test_the_text_of_a_stream(llm: LLM) -> None:
    states = list(llm.stream("hello the", SamplingParams(**{**vars(DRAWN), "seed": 5})))
    shown = "".join(segment.text for state in states for segment in state.segments)
    assert shown == states[-1].text == after(states[-1].prompt_token_ids, states[-1].token_ids)
    assert shown


@pytest.mark.parametrize("prompt", ["hello", ids("▁hello"), ids("<s>", "▁hello", "</s>", "</s>")])
def test_a_word_behind_a_prompt_keeps_its_space(llm: LLM, prompt: str | list[int]) -> None:
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=2, allowed_token_ids=[WORLD], ignore_eos=True))
    assert output.text == " world world"


@pytest.mark.parametrize(
    "structure", [StructuredOutputsParams(choice=[" cat"]), StructuredOutputsParams(regex=r" (cat|hello)s*,")]
)
def test_structured_text_that_begins_with_a_space_is_whole(llm: LLM, structure: StructuredOutputsParams) -> None:
    params = SamplingParams(max_tokens=40, structured_outputs=structure, seed=1)
    (output,) = llm.generate("hello", params)
    assert output.finish_reason == "stop"
    assert output.text.startswith((" cat", " hello"))


def test_texts_of_beams_hold_the_prompt(llm: LLM) -> None:
    from specdec import BeamSearchParams

    (output,) = llm.beam_search(["hello"], BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True))
    for beam in output.sequences:
        assert beam.text == TOKENIZER.decode(beam.tokens)


def test_pieces_of_traced_steps_join_to_the_text(llm: LLM) -> None:
    params = SamplingParams(**{**vars(DRAWN), "seed": 6})
    *_, output = llm.stream("hello", params, trace=True)
    steps = StepReporter(TOKENIZER, params).new_steps(output.outputs[0])
    assert "".join(piece.text for step in steps for piece in step.pieces) == output.text


@settings(max_examples=num_cases(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompt=st.lists(st.sampled_from([*WORD_IDS, *ids("</s>", "<|im_end|>")]), min_size=1, max_size=20),
    choices=st.lists(st.sampled_from(CHOICES), min_size=1, max_size=4, unique=True),
)
@example(prompt=ids("▁hello"), choices=["cat", " cat"])
@example(prompt=ids("▁cat"), choices=["s", ",", " the"])
@example(prompt=ids("▁hello", "▁"), choices=[" cat", "x"])
@example(prompt=ids("▁the", "</s>"), choices=[" cat"])
def test_choices_continue_a_prompt_of_token_ids(llm: LLM, prompt: list[int], choices: list[str]) -> None:
    """The prompt stays as it is, and the choice's tokens are its text behind the prompt's."""
    (output,) = llm.generate(prompt, SamplingParams(choices=choices), use_tqdm=False)
    assert output.prompt_token_ids == prompt
    assert output.choices is not None
    assert [after(prompt, choice.token_ids, hides=False) for choice in output.choices] == choices


def test_a_prompt_that_is_none_is_still_refused(llm: LLM) -> None:
    for wrong in ([VOCAB], [-1], ["a"], [True], []):
        with pytest.raises(ValueError, match="prompt"):
            llm.generate([wrong], SamplingParams(choices=[" cat"]))  # type: ignore[list-item]
