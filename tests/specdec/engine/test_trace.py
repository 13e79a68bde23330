"""The trace of a request: each step's draft tree and what the output took of it."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec import LLM, CompletionOutput, DraftShape, SamplingParams, Speculation
from specdec.core.outputs import TreeTrace
from specdec.core.request import Request
from specdec.engine.step_results import node_probs
from specdec.kernels.types.tree import DraftTree
from specdec.scheduling.step_cost import StepCost
from tests.fakes import save_random_head, save_random_llama
from tests.new_groups import new_group
from tests.simulated_gpu import simulated_gpu

pytestmark = pytest.mark.slow

PROMPT = [3, 4, 5]
FREE = SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True)
SHAPE = DraftShape(3, 24, 60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("trace")
    save_random_llama(folder / "target", head_dim=16)
    save_random_head(folder / "head", head_dim=16)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    head = folder / "head"
    return LLM(folder / "target", head, dtype="float64", shape=SHAPE, adaptive_drafts=False, max_model_len=64)


def traced(llm: LLM, params: SamplingParams) -> tuple[CompletionOutput, list[TreeTrace]]:
    """Return the last state of the first sample, and its steps."""
    *_, last = llm.stream(PROMPT, params, trace=True)
    return last.outputs[0], last.outputs[0].trace


def assert_tells_the_output(steps: list[TreeTrace], output: CompletionOutput) -> None:
    """The steps yield the output's tokens, and its accepted ones are nodes of their trees, one below the other."""
    assert [token for step in steps for token in step.output] == output.token_ids
    accepted = [place < len(step.path) for step in steps for place in range(len(step.output))]
    assert accepted == output.accepted
    for step in steps:
        assert [step.parents[node] for node in step.path] == [-1, *step.path][: len(step.path)]
        assert [step.tokens[node] for node in step.path] == list(step.output[: len(step.path)])
    roots = [PROMPT[-1], *(step.output[-1] for step in steps[:-1])]
    assert [step.root for step in steps] == roots


@pytest.mark.long
def test_steps_tell_the_output(llm: LLM) -> None:
    output, steps = traced(llm, FREE)
    assert_tells_the_output(steps, output)
    assert output.token_ids == llm.generate(PROMPT, FREE)[0].token_ids
    # The prompt's pass has no tree, and neither has a step for the last token alone.
    assert steps[0][1:4] == ((), (), ())
    assert len(steps) == 1 + output.stats.steps
    assert sum(len(step.tokens) for step in steps) == output.stats.drafted > 0
    assert any(step.path for step in steps)


@pytest.mark.long
def test_steps_tell_what_they_would_take_without_drafts(
    llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepCost, "without_drafts", lambda _, rows, prompts: 100.0 * rows + prompts)
    drafted = [step for step in traced(llm, FREE)[1] if step.tokens]
    assert {step.plain_seconds for step in drafted} == {100}
    *_, last = llm.stream(PROMPT, replace(FREE, n=2), trace=True)
    found = [{step.plain_seconds for step in output.trace if step.tokens} for output in last.outputs]
    assert all(200 in each and each <= {100, 200} for each in found)
    _, plain = traced(llm, replace(FREE, speculation=Speculation(enabled=False)))
    assert all(step.plain_seconds == step.seconds for step in plain)
    unmeasured = LLM(
        folder / "target",
        folder / "head",
        dtype="float64",
        shape=SHAPE,
        adaptive_drafts=False,
        prefill_stretch=0,
        max_model_len=64,
    )
    assert {step.plain_seconds for step in traced(unmeasured, FREE)[1] if step.tokens} == {None}


@pytest.mark.long
def test_path_ends_where_the_output_ends(folder: Path) -> None:
    """An accepted token that the output did not take is not on the path, and then there is no bonus token."""
    # The target drafts for itself, so that whole paths are accepted.
    target, shape = folder / "target", DraftShape(3, 2, 6)
    llm = LLM(target, target, dtype="float64", shape=shape, adaptive_drafts=False, max_model_len=64)
    output, steps = traced(llm, FREE)
    step = next(step for step in steps if len(step.path) == 3)
    assert len(step.output) == 4
    end = step.output[1]
    stop = SamplingParams(temperature=0.8, seed=3, max_tokens=30, stop_token_ids=[end], ignore_eos=True)
    stopped, steps = traced(llm, stop)
    assert stopped.token_ids == output.token_ids[: output.token_ids.index(end) + 1]
    assert_tells_the_output(steps, stopped)
    assert steps[-1].path == step.path[:2]
    assert steps[-1].output == step.output[:2]


def test_each_sample_has_its_own_trace(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, n=3, ignore_eos=True)
    states = list(llm.stream(PROMPT, params, trace=True))
    for output in states[-1].outputs:
        assert_tells_the_output(output.trace, output)


@pytest.mark.long
def test_nothing_is_recorded_unless_asked_for(llm: LLM) -> None:
    *_, last = llm.stream(PROMPT, FREE)
    assert last.outputs[0].trace == []
    assert all(step.trace is None for step in last.outputs[0].steps)
    assert len(last.outputs[0].steps) > 0


@pytest.mark.long
def test_nothing_is_computed_for_other_requests(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[Request] = []

    def spy(request: Request, *rest: Any) -> tuple[float, ...]:
        computed.append(request)
        return node_probs(request, *rest)

    monkeypatch.setattr("specdec.engine.step_results.node_probs", spy)
    plain, watched = new_group(llm, PROMPT, FREE), new_group(llm, PROMPT[1:], FREE)
    watched.requests[0].is_traced = True
    for group in (plain, watched):
        llm.engine.scheduler.add(group.requests[0])
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert set(computed) == set(watched.requests)


EDITED = SamplingParams(
    temperature=0.7, seed=3, max_tokens=30, ignore_eos=True, top_p=0.8, presence_penalty=0.5, logit_bias={7: 2.0}
)


@pytest.mark.long
@pytest.mark.parametrize("params", [FREE, EDITED, replace(FREE, temperature=0.0)], ids=["free", "edited", "greedy"])
def test_probabilities_are_the_targets(llm: LLM, params: SamplingParams) -> None:
    """Those of the output's tokens are what `logprobs` reports, from the distribution that is sampled from."""
    output, steps = traced(llm, params)
    scored = LLM(
        llm.config.model,
        draft=None,
        dtype="float64",
        max_model_len=64,
        logprobs_mode="processed_logprobs",
        adaptive_drafts=False,
        prefill_stretch=0,
    )
    (plain,) = scored.generate(PROMPT, replace(params, logprobs=-1), use_tqdm=False)
    assert plain.token_ids == output.token_ids
    rows = plain.outputs[0].logprobs
    assert rows is not None
    found = place = 0
    for step in steps:
        # The children of the root and of the accepted nodes: after these the plain run has computed the distribution.
        known = {-1: place, **{node: place + depth for depth, node in enumerate(step.path, 1)}}
        for token, parent, prob in zip(step.tokens, step.parents, step.probs, strict=True):
            if known.get(parent, len(rows)) < len(rows):
                expected = rows[known[parent]][token].logprob
                assert prob == pytest.approx(math.exp(expected), rel=1e-9, abs=1e-12)
                found += 1
        place += len(step.output)
    assert found > 30


def test_values_rank_the_nodes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = []
    propose = llm.engine.worker.drafter.propose

    def spy(*given: Any) -> Any:
        trees = propose(*given)
        ranks.extend(tree.ranks for tree in trees.read() if len(tree))
        return trees

    monkeypatch.setattr(llm.engine.worker.drafter, "propose", spy)
    _, steps = traced(llm, FREE)
    drafted = [step for step in steps if step.tokens]
    assert len(drafted) == len(ranks) > 0
    for step, rank in zip(drafted, ranks, strict=True):
        in_order = [value for _, value in sorted(zip(rank, step.values, strict=True))]
        assert in_order == sorted(step.values, reverse=True)
        assert all(
            step.values[node] <= (0 if parent < 0 else step.values[parent]) for node, parent in enumerate(step.parents)
        )
    assert all(0 < step.seconds < 60 for step in steps)


@pytest.mark.long
def test_drawn_trees_have_values(folder: Path) -> None:
    """A drawn child's value is its parent's and the log-probability that it was drawn with, summed in float32."""
    llm = LLM(
        folder / "target",
        folder / "head",
        dtype="float64",
        shape=DraftShape(3, 4, 8),
        verify="rejection",
        adaptive_drafts=False,
        max_model_len=64,
    )
    trees: list[DraftTree] = []
    propose = llm.engine.worker.drafter.propose

    def spy(*given: Any) -> Any:
        found = propose(*given)
        trees.extend(tree for tree in found.read() if len(tree))
        return found

    llm.engine.worker.drafter.propose = spy  # type: ignore[method-assign]
    _, steps = traced(llm, FREE)
    drafted = [step for step in steps if step.tokens]
    assert len(drafted) == len(trees) > 0
    for step, tree in zip(drafted, trees, strict=True):
        assert tree.draft_probs is not None
        for node, (token, parent) in enumerate(zip(step.tokens, step.parents, strict=True)):
            above = 0.0 if parent < 0 else step.values[parent]
            chance = float(tree.draft_probs[1 + parent, token])
            assert step.values[node] == pytest.approx(above + math.log(chance), rel=1e-6, abs=1e-5)


def test_n_grams_have_no_values(folder: Path) -> None:
    llm = LLM(folder / "target", "ngram", dtype="float64", max_model_len=64, adaptive_drafts=False)
    *_, last = llm.stream([3, 4, 5, 3, 4, 5, 3, 4, 5], replace(FREE, temperature=0.0), trace=True)
    drafted = [step for step in last.outputs[0].trace if step.tokens]
    assert drafted
    assert all(set(step.values) == {None} and len(step.probs) == len(step.tokens) for step in drafted)


@pytest.mark.long
def test_trees_of_a_device_are_traced_with_one_wait_a_tree(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_gpu(monkeypatch) as gpu:
        llm = LLM(
            folder / "target",
            folder / "head",
            device="cuda",
            dtype="float32",
            shape=DraftShape(2, 2, 4),
            adaptive_drafts=False,
            enforce_eager=True,
            prefill_stretch=0,
            max_model_len=48,
            kv_cache_memory=1 << 18,
        )
        params = SamplingParams(temperature=0.8, seed=3, max_tokens=5, ignore_eos=True)
        waits = []
        for trace in (False, True):
            gpu.waits.clear()
            states = list(llm.stream(PROMPT, params, trace=trace))
            waits.append(list(gpu.waits))
    steps = states[-1].outputs[0].trace
    assert_tells_the_output(steps, states[-1].outputs[0])
    assert sum(len(step.tokens) for step in steps) == states[-1].stats.drafted > 0
    # Trees come with their outcome; the host waits once more for the probabilities of a tree.
    assert len(waits[1]) - len(waits[0]) == sum(bool(step.tokens) for step in steps)
    assert waits[0] != []
