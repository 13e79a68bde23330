"""Scores of choices: those of one request each, in one pass of the target."""

from collections.abc import Sequence
from typing import Any

import pytest

from specdec import LLM, DraftShape, SamplingParams
from specdec.core.outputs import RequestOutput
from specdec.engine.request_texts import common_length
from specdec.execution.model_runner import PreparedPass
from specdec.kernels.native.library import library_file
from specdec.kernels.types.draft_trees import DraftTrees
from specdec.kernels.types.tree import TreeRow
from specdec.kernels.types.upload import Packet
from tests.specdec.world import World

pytestmark = pytest.mark.slow

QUIET: dict[str, Any] = {"adaptive_drafts": False, "prefill_stretch": 0}
PROMPT = "I would like to find a cheap restaurant in the centre of town. The assistant asks about"
WORDS = ("the", "a", "your", "my", "this")
KINDS = ("food", "area", "price", "number of people", "time", "name", "phone", "postcode", "booking", "day")
HUNDRED = [f" {word} {kind}{mark}" for word in WORDS for kind in KINDS for mark in ".?"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(draft="eagle", dtype="float64", kernels="torch", **QUIET)


def one_by_one(llm: LLM, output: RequestOutput) -> list[list[float]]:
    """Return the log-probabilities of each choice's tokens, scored as the end of a prompt."""
    assert output.choices is not None
    prompts = [output.prompt_token_ids + choice.token_ids for choice in output.choices]
    params = SamplingParams(prompt_logprobs=0, max_tokens=1)
    found = []
    for one in llm.generate(prompts, params, use_tqdm=False):
        assert one.prompt_logprobs is not None
        entries = list(zip(one.prompt_token_ids, one.prompt_logprobs, strict=True))[len(output.prompt_token_ids) :]
        found.append([entry[token].logprob for token, entry in entries if entry is not None])
    return found


@pytest.mark.long
def test_a_hundred_choices_take_one_pass(llm: LLM) -> None:
    before = llm.stats()
    (output,) = llm.generate(PROMPT, SamplingParams(choices=HUNDRED))
    after = llm.stats()
    assert output.choices is not None
    assert len(output.choices) == 100
    assert after.steps - before.steps == 1
    # No drafts, and no tokens.
    assert (after.drafts_verified, after.generated_tokens) == (before.drafts_verified, before.generated_tokens)
    assert (output.finish_reason, output.text, output.token_ids) == ("stop", "", [])
    for choice, own in zip(output.choices, one_by_one(llm, output), strict=True):
        assert choice.logprobs == pytest.approx(own, abs=1e-9)
        assert choice.normalized_logprob == pytest.approx(sum(own) / len(own), abs=1e-9)


@pytest.mark.long
def test_rows_are_the_beginnings_of_choices(llm: LLM) -> None:
    """A pass has a row for each beginning that choices have in common or alone, and none for a last token."""
    runner, rows = llm.engine.worker.runner, list[int]()
    prompt = [3 + i for i in range(2 * llm.engine.worker.cache.block_size + 1)]
    llm.generate([prompt], SamplingParams(max_tokens=1))
    prepare = runner.prepare

    def counted(parts: Sequence[TreeRow], trees: DraftTrees, packet: Packet) -> PreparedPass:
        rows.append(sum(len(part.tokens) for part in parts) + sum(trees.sizes))
        return prepare(parts, trees, packet)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "prepare", counted)
        for choices, expected in (
            # The prompt's last token alone: as many rows as a plain step.
            ([[50 + i] for i in range(100)], 1),
            ([[50 + i, 7] for i in range(20)], 21),
            ([[50, 7, 1 + i] for i in range(20)], 3),
            ([[50, 7], [50, 7, 9], [50, 8, 9], [7]], 4),
        ):
            (output,) = llm.generate([prompt], SamplingParams(choices=choices))
            assert output.choices is not None
            assert rows == [expected], choices
            assert expected == 1 + len({tuple(choice[:end]) for choice in choices for end in range(1, len(choice))})
            rows.clear()


def test_a_stream_has_one_state(llm: LLM) -> None:
    (state,) = llm.stream(PROMPT, SamplingParams(choices=HUNDRED[:5]), trace=True)
    (output,) = llm.generate(PROMPT, SamplingParams(choices=HUNDRED[:5]))
    assert state.finished
    assert state.choices is not None
    assert output.choices is not None
    assert [one.token_ids for one in state.choices] == [one.token_ids for one in output.choices]
    assert state.metrics is not None
    assert state.metrics.first_token_ts > state.metrics.queued_ts


@pytest.mark.long
@pytest.mark.skipif(library_file() is None, reason="the native kernels are not built here")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_scores_are_the_same_bits(dtype: str) -> None:
    llm = LLM(draft=None, dtype=dtype, kernels="native", **QUIET)
    (output,) = llm.generate(PROMPT, SamplingParams(choices=HUNDRED))
    assert output.choices is not None
    assert [choice.logprobs for choice in output.choices] == one_by_one(llm, output)


def test_tokens_are_those_of_the_whole_text(llm: LLM) -> None:
    """A token may hold the end of the prompt and the beginning of a choice."""
    tokenizer = llm.get_tokenizer()
    for prompt in ("I would like to find a", "I would like to find a ", "I would like to find a rest"):
        choices = ["restaurant", "hotel", " hotel", "aurant in town"]
        (output,) = llm.generate(prompt, SamplingParams(choices=choices))
        assert output.choices is not None
        for choice, text in zip(output.choices, choices, strict=True):
            assert output.prompt_token_ids + choice.token_ids == tokenizer(prompt + text)["input_ids"]
    # Nothing precedes the choices of a prompt of tokens but these.
    (output,) = llm.generate([5, 6, 7], SamplingParams(choices=choices))
    assert output.choices is not None
    assert output.prompt_token_ids == [5, 6, 7]
    assert output.choices[0].token_ids == tokenizer("restaurant", add_special_tokens=False)["input_ids"]


def test_common_length() -> None:
    assert common_length([[1, 2, 3], [1, 2], [1, 2, 9]]) == 2
    assert common_length([[1, 2], [3]]) == 0
    assert common_length([[1, 2]]) == 2


@pytest.mark.long
def test_scores_beside_requests_that_draft(llm: LLM) -> None:
    """The prompt comes from the prefix cache, and no tree is larger than a step."""
    small = LLM(draft="eagle", dtype="float64", kernels="torch", max_num_batched_tokens=24, max_num_seqs=4, **QUIET)
    prompts = [PROMPT, PROMPT, "Hello, I need a"]
    params = [
        SamplingParams(temperature=0, max_tokens=24),
        SamplingParams(choices=HUNDRED[:30]),
        SamplingParams(temperature=1, seed=5, max_tokens=24),
    ]
    found = small.generate(prompts, params, use_tqdm=False)
    expected = [llm.generate(prompt, one)[0] for prompt, one in zip(prompts, params, strict=True)]
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert found[1].choices is not None
    assert expected[1].choices is not None
    for one, other in zip(found[1].choices, expected[1].choices, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-9)
    assert (found[1].num_cached_tokens or 0) > 0
    assert small.stats().drafts_verified > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_that_overflow_fail_alone(world: World, dtype: str) -> None:
    llm = LLM(world.folder / "target", None, dtype=dtype, shape=DraftShape(2, 2, 4), kernels="torch", **QUIET)
    output = llm.engine.worker.runner.model.output
    llm.engine.worker.runner.model.output = lambda rows: output(rows) * float("inf")  # type: ignore[assignment]
    (found,) = llm.generate([[5, 6, 7]], SamplingParams(choices=[[1, 2], [3]]))
    assert (found.finish_reason, found.choices) == ("error", None)
    assert found.outputs[0].error == "the choices cannot be scored: the model's logits are not finite"
    assert llm.stats().kv_usage == 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"choices": []}, "choices is \\[\\]; it must be a list of texts, or of lists of token ids"),
        ({"choices": "yes"}, "choices is 'yes'"),
        ({"choices": ["yes", [1]]}, "choices holds 'yes'"),
        ({"choices": ["yes", ""]}, "choices holds an empty one"),
        ({"choices": [[1], []]}, "choices holds an empty one"),
        ({"choices": ["a"], "n": 2}, "n is 2; a request with choices generates nothing"),
        ({"choices": ["a"], "logprobs": 0}, "logprobs is 0; a request with choices"),
        ({"choices": ["a"], "prompt_logprobs": 1}, "prompt_logprobs is 1; a request with choices"),
        ({"choices": ["a"], "stop": "."}, "stop is '.'; a request with choices"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


def test_choices_that_do_not_fit_are_refused(llm: LLM) -> None:
    vocab, longest = llm.model.config.vocab_size, llm.max_model_len
    with pytest.raises(ValueError, match=f"choices holds {vocab}; token ids lie between 0 and {vocab - 1}"):
        llm.generate([5], SamplingParams(choices=[[vocab]]))
    with pytest.raises(ValueError, match=f"choices holds one of {longest} tokens, the prompt has 1"):
        llm.generate([5], SamplingParams(choices=[[5] * longest]))
