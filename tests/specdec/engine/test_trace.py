"""The trace of a request: each step's draft tree and what the output took of it."""

from pathlib import Path

import pytest

from specdec import LLM, CompletionOutput, DraftShape, SamplingParams
from specdec.core.outputs import TracedStep
from tests.fakes import save_random_head, save_random_llama
from tests.simulated_gpu import simulated_gpu

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


def traced(llm: LLM, params: SamplingParams) -> tuple[CompletionOutput, list[TracedStep]]:
    """Return the last state of the first sample, and its steps from all states."""
    states = list(llm.stream(PROMPT, params, trace=True))
    return states[-1].outputs[0], [step for state in states for step in state.outputs[0].trace]


def assert_tells_the_output(steps: list[TracedStep], output: CompletionOutput) -> None:
    """The steps yield the output's tokens, and its accepted ones are nodes of their trees, one below the other."""
    assert [token for step in steps for token in step.output] == output.token_ids
    accepted = [place < len(step.path) for step in steps for place in range(len(step.output))]
    assert accepted == output.accepted
    for step in steps:
        assert [step.parents[node] for node in step.path] == [-1, *step.path][: len(step.path)]
        assert [step.tokens[node] for node in step.path] == list(step.output[: len(step.path)])
    roots = [PROMPT[-1], *(step.output[-1] for step in steps[:-1])]
    assert [step.root for step in steps] == roots


def test_steps_tell_the_output(llm: LLM) -> None:
    output, steps = traced(llm, FREE)
    assert_tells_the_output(steps, output)
    assert output.token_ids == llm.generate(PROMPT, FREE)[0].token_ids
    # The prompt's pass has no tree, and neither has a step for the last token alone.
    assert steps[0][1:4] == ((), (), ())
    assert len(steps) == 1 + output.stats.steps
    assert sum(len(step.tokens) for step in steps) == output.stats.drafted > 0
    assert any(step.path for step in steps)


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
    for sample, output in enumerate(states[-1].outputs):
        assert_tells_the_output([step for state in states for step in state.outputs[sample].trace], output)


def test_nothing_is_recorded_unless_asked_for(llm: LLM) -> None:
    group = llm.new_group(PROMPT, FREE)
    assert group.requests[0].trace is None
    assert not any(state.outputs[0].trace for state in llm.stream(PROMPT, FREE))


def test_trees_of_a_device_are_traced_without_another_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    steps = [step for state in states for step in state.outputs[0].trace]
    assert_tells_the_output(steps, states[-1].outputs[0])
    assert sum(len(step.tokens) for step in steps) == states[-1].stats.drafted > 0
    assert waits[0] == waits[1] != []
