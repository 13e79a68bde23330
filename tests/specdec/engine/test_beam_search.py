"""Beam search against transformers', however memory and seats are cramped."""

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from specdec import LLM, BeamSearchParams, DraftShape, SamplingParams
from specdec.config import DEMO
from specdec.scheduling.step_plan import RowResult, StepPlan
from tests.fakes import save_random_head, save_random_llama
from tests.profiles import by_day
from tests.specdec.beams import BLOCK, Tiny, check, cramped, tokens_of, watched

pytestmark = pytest.mark.slow

PROMPTS = Path(__file__).parents[3] / "benchmarks" / "prompts"
# Of the tiny model: its output comes to none of these, to some now and then, to some at once.
ENDS = [[], [5, 40], [3, 9, 17, 33, 50, 60, 70, 80]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    root = tmp_path_factory.mktemp("beams")
    save_random_head(root / "head")
    return Tiny(root / "target", root / "head", save_random_llama(root / "target"))


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Often so sure of a token that a late end can still be one of the best."""
    root = tmp_path_factory.mktemp("sharp")
    return Tiny(root, root, save_random_llama(root, initializer_range=0.8))


@pytest.fixture(scope="module")
def sharp_llm(sharp: Tiny) -> Iterator[LLM]:
    yield from watched(LLM(sharp.folder, draft=None, dtype="float64"))


@pytest.fixture(scope="module")
def llm(tiny: Tiny) -> Iterator[LLM]:
    yield from watched(LLM(tiny.folder, draft=None, dtype="float64"))


def end_with(llm: LLM, tokens: Iterable[int]) -> None:
    """Change the tokens after which outputs end."""
    llm.request_maker.generation_config = replace(llm.generation_config, end_tokens=frozenset(tokens))


@pytest.mark.long
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("beam_width", by_day([1, 4, 2, 5], 2))
def test_sequences_and_scores_equal_transformers(tiny: Tiny, llm: LLM, beam_width: int, early_stopping: Any) -> None:
    for ends, length_penalty in itertools.product(ENDS, (0, 1, 2, -0.5)):
        end_with(llm, ends)
        params = BeamSearchParams(beam_width, 16, length_penalty=length_penalty, early_stopping=early_stopping)
        prompts = [[3, 4, 5], [10, 20, 30, 40, 50, 60, 7]]
        for prompt, output in zip(prompts, llm.beam_search(prompts, params), strict=True):
            check(tiny.reference, prompt, params, ends, output)


@given(
    prompt=st.lists(st.integers(0, 96), min_size=1, max_size=8),
    beam_width=st.integers(2, 6),
    length_penalty=st.sampled_from([-1.0, -0.5, 0.0, 0.7, 1.0, 3.0]),
    early_stopping=st.sampled_from([False, True, "never"]),
    ends=st.sets(st.integers(0, 96), min_size=1, max_size=40),
)
# Where the greatest length, taken for a penalty below 0 as for one above, would end the search too early.
@example([80, 66, 63, 84, 0, 64], 2, -0.5, "never", {81, 34, 25, 85, 84, 93, 70, 0})
def test_drawn_searches_equal_transformers(
    sharp: Tiny,
    sharp_llm: LLM,
    prompt: list[int],
    beam_width: int,
    length_penalty: float,
    early_stopping: Any,
    ends: set[int],
) -> None:
    end_with(sharp_llm, ends)
    params = BeamSearchParams(beam_width, 16, length_penalty=length_penalty, early_stopping=early_stopping)
    check(sharp.reference, prompt, params, sorted(ends), sharp_llm.beam_search(prompt, params)[0])


@pytest.mark.long
def test_real_prompts_equal_transformers() -> None:
    """On the built-in model; with its draft head loaded, no draft is asked for."""
    reference = AutoModelForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float64).eval()
    plain, eagle = LLM(draft=None, dtype="float64"), LLM(draft="eagle", dtype="float64")
    prompts = []
    for name in ("sgd-eval", "gsm8k-eval"):
        lines = (PROMPTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        prompts += [plain.chat_prompt(json.loads(line)["messages"]) for line in lines[:1]]
    params = BeamSearchParams(4, 32)
    outputs = plain.beam_search(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        check(reference, prompt, params, sorted(plain.end_tokens), output)
    assert any(sequence.finish_reason == "stop" for output in outputs for sequence in output.sequences)
    texts = [sequence.text for sequence in outputs[0].sequences]
    assert len(set(texts)) == 4
    assert texts[0] == plain.request_maker.texts.need_tokenizer().decode(outputs[0].sequences[0].tokens)
    for output, drafted in zip(outputs, eagle.beam_search(prompts, params), strict=True):
        assert [s.tokens for s in drafted.sequences] == [s.tokens for s in output.sequences]
    assert eagle.engine.scheduler.stats().drafts_asked == eagle.engine.scheduler.stats().drafts_verified == 0


@pytest.mark.long
def test_a_prompt_of_one_token_gets_no_drafts_either(tiny: Tiny, llm: LLM) -> None:
    drafting = LLM(tiny.folder, tiny.head, dtype="float64", shape=DraftShape(3, 2, 6))
    params = BeamSearchParams(3, 8, ignore_eos=True)
    assert tokens_of(drafting.beam_search([7], params)) == tokens_of(llm.beam_search([7], params))
    assert drafting.engine.scheduler.stats().drafts_verified == 0
    # The head works where it may.
    drafting.generate([7], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert drafting.engine.scheduler.stats().drafts_verified > 0


def test_each_step_computes_one_token_a_beam_and_beams_share_blocks(tiny: Tiny) -> None:
    llm = LLM(tiny.folder, draft=None, dtype="float64", block_size=BLOCK)
    scheduler = llm.engine.scheduler
    pool, update = scheduler.manager.pool, scheduler.update
    held = []

    def counted(plan: StepPlan, results: Sequence[RowResult]) -> None:
        update(plan, results)
        held.append(pool.num_blocks - pool.num_free)

    scheduler.update = counted  # type: ignore[method-assign]
    llm.beam_search([list(range(3, 55))], BeamSearchParams(4, 20, ignore_eos=True))
    assert scheduler.stats().known_tokens == 52 + 4 * 19
    assert scheduler.stats().steps == 20
    # The prompt fills six blocks and half of a seventh; the outputs reach into the ninth.
    assert held[0] == 7
    assert held[1] == 6 + 4
    assert max(held) <= 6 + 4 * 3


@pytest.mark.long
@given(
    prompts=st.lists(st.lists(st.integers(0, 96), min_size=1, max_size=20), min_size=1, max_size=3),
    beam_width=st.integers(1, 5),
    max_tokens=st.integers(1, 12),
    ends=st.sampled_from(ENDS),
    blocks=st.integers(4, 12),
    seats=st.integers(5, 12),
    chunk=st.integers(12, 40),
    caching=st.booleans(),
)
def test_little_memory_changes_nothing(
    tiny: Tiny,
    llm: LLM,
    prompts: list[list[int]],
    beam_width: int,
    max_tokens: int,
    ends: list[int],
    blocks: int,
    seats: int,
    chunk: int,
    caching: bool,
) -> None:
    small = cramped(
        tiny,
        blocks,
        max_num_seqs=seats,
        max_num_batched_tokens=chunk,
        enable_prefix_caching=caching,
    )
    params = BeamSearchParams(beam_width, max_tokens)
    end_with(llm, ends)
    end_with(small, ends)
    for tight in watched(small):
        outputs = tight.beam_search(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        alone = llm.beam_search(prompt, params)[0]
        assert tokens_of([output]) == tokens_of([alone])
        assert [s.score for s in output.sequences] == pytest.approx([s.score for s in alone.sequences], abs=1e-9)
        assert all(len(s.logprobs) == len(s.token_ids) for s in output.sequences)


@pytest.mark.long
@pytest.mark.parametrize("blocks", [4, 9])
def test_preempted_beams_lose_nothing(tiny: Tiny, llm: LLM, blocks: int) -> None:
    """Four blocks hold one beam, so that scored ones have to make room; nine hold some."""
    small = cramped(tiny, blocks, enable_prefix_caching=False)
    params = BeamSearchParams(4, 20, ignore_eos=True)
    for tight in watched(small):
        outputs = tight.beam_search([[3, 4, 5, 6, 7, 8], [30, 31]], params)
        assert tight.engine.scheduler.stats().preemptions > 0
    assert tokens_of(outputs) == tokens_of(llm.beam_search([[3, 4, 5, 6, 7, 8], [30, 31]], params))


@pytest.mark.long
def test_ordinary_requests_go_on_beside_a_search(tiny: Tiny, llm: LLM) -> None:
    """Four of five seats are taken when the search begins."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    beams = BeamSearchParams(4, 12, ignore_eos=True)
    want = [output.token_ids for output in llm.generate([[3], [4], [5], [6]], params)]
    for busy in watched(cramped(tiny, 40, max_num_seqs=5)):
        stream = busy.stream([[3], [4], [5], [6]], params)
        next(stream)
        assert tokens_of(busy.beam_search([[7, 8]], beams)) == tokens_of(llm.beam_search([[7, 8]], beams))
        states = {state.prompt_token_ids[0]: state.token_ids for state in stream}
        assert [states[token] for token in (3, 4, 5, 6) if token in states] == want[-len(states) :]


def test_more_prompts_than_may_queue_take_turns(tiny: Tiny, llm: LLM) -> None:
    """Searches run only while there are seats for all their beams, so nothing is computed twice."""
    prompts, params = [[token, 9] for token in range(3, 9)], BeamSearchParams(3, 6)
    end_with(llm, ENDS[1])
    known = llm.engine.scheduler.stats().known_tokens
    want = [llm.beam_search([prompt], params)[0] for prompt in prompts]
    known = llm.engine.scheduler.stats().known_tokens - known
    for small in watched(cramped(tiny, 40, max_num_seqs=7, max_queued_requests=1)):
        end_with(small, llm.end_tokens)
        assert tokens_of(small.beam_search(prompts, params)) == tokens_of(want)
        assert small.engine.scheduler.stats().known_tokens == known


@pytest.mark.parametrize("where", ["prepare", "fork"])
def test_an_interrupt_leaves_nothing_behind(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    for llm in watched(LLM(tiny.folder, draft=None, dtype="float64")):
        owner = llm.engine.worker.runner if where == "prepare" else llm.engine.scheduler
        plain, left = getattr(owner, where), iter(range(5))

        def interrupted(*args: Any, plain: Any = plain, left: Iterator[int] = left) -> Any:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return plain(*args)

        monkeypatch.setattr(owner, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.beam_search([[3, 4], [5]], BeamSearchParams(4, 20, ignore_eos=True))


@pytest.mark.parametrize("place", [0, 3])
def test_logits_that_are_not_finite_fail_their_prompt_alone(tiny: Tiny, llm: LLM, place: int) -> None:
    """At the prompt, and later at a beam's token."""
    params = BeamSearchParams(3, 10, ignore_eos=True)
    want = llm.beam_search([[3, 4, 5], [6, 7]], params)
    other = {token for sequence in want[1].sequences for token in sequence.tokens}
    broken = next(token for token in want[0].sequences[0].tokens[place:-1] if token not in other)
    for spoilt in watched(LLM(tiny.folder, draft=None, dtype="float64")):
        spoilt.model.embed_tokens.weight[broken] = torch.nan
        outputs = spoilt.beam_search([[3, 4, 5], [6, 7]], params)
        assert outputs[0].sequences == []
        assert "logits are not finite" in str(outputs[0].error)
        assert outputs[1].error is None
        assert tokens_of(outputs[1:]) == tokens_of(want[1:])


def test_beams_of_a_search_with_a_result_count_as_finished(tiny: Tiny) -> None:
    for llm in watched(LLM(tiny.folder, dtype="float64")):
        outputs = llm.beam_search([[3, 4], [5]], BeamSearchParams(4, 20, ignore_eos=True))
        stats = llm.stats()
        assert (stats.queued, stats.finished, stats.aborted) == (2 * (1 + 4 * 19), 2 * (1 + 4 * 19), 0)
        assert stats.generated_tokens == sum(len(one.token_ids) for output in outputs for one in output.sequences)


def test_beams_of_an_interrupted_search_count_as_aborted(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    for llm in watched(LLM(tiny.folder, dtype="float64")):
        monkeypatch.setattr(llm.engine.scheduler, "fork", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.beam_search([3, 4], BeamSearchParams(4, 20, ignore_eos=True))
        stats = llm.stats()
        assert (stats.queued, stats.finished, stats.aborted, stats.generated_tokens) == (1, 0, 1, 0)


def raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_the_context_bounds_the_output_and_the_vocabulary_the_beams(tmp_path: Path) -> None:
    save_random_llama(tmp_path, vocab_size=6, max_position_embeddings=16)
    for llm in watched(LLM(tmp_path, draft=None, dtype="float64")):
        output = llm.beam_search([1] * 12, BeamSearchParams(2, 100, ignore_eos=True))[0]
        assert [len(sequence.token_ids) for sequence in output.sequences] == [4, 4]
        output = llm.beam_search([1], BeamSearchParams(20, 1, ignore_eos=True))[0]
        assert sorted(sequence.token_ids for sequence in output.sequences) == [[token] for token in range(6)]


def test_invalid_searches_are_refused_before_anything_runs(tiny: Tiny, llm: LLM) -> None:
    params = BeamSearchParams(2, 8)
    with pytest.raises(ValueError, match="beam_width is 65; it must be at most max_num_seqs, 64"):
        llm.beam_search([[1]], BeamSearchParams(65, 8))
    for prompt, message in [([], "the prompt is empty"), ([97], "outside the vocabulary"), ("text", "tokenizer")]:
        with pytest.raises(ValueError, match=message):
            llm.beam_search([[1], prompt], params)
    for small in watched(cramped(tiny, 4, max_model_len=100)):
        with pytest.raises(ValueError, match="needs 5 cache blocks of 8, and there are 4; lower max_tokens"):
            small.beam_search([[1], [1] * 30], params)
        assert small.engine.scheduler.stats().steps == 0
    assert llm.beam_search([], params) == []
