"""`benchmarks.engine_overhead`: the clock finds the library's calls within the engine's steps."""

from pathlib import Path

import pytest

from benchmarks.engine_overhead import StepClock
from specdec import LLM, SamplingParams
from specdec.engine.engine import LLMEngine
from specdec.kernels.native.library import Library, library_file
from tests.fakes import save_random_llama


@pytest.mark.skipif(library_file() is None, reason="the native kernels are not built here")
def test_arithmetic_is_a_part_of_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_random_llama(tmp_path)
    llm = LLM(tmp_path, draft="ngram", dtype="float32", kernels="native")
    # The clock replaces both for good.
    for owner, name in ((Library, "call"), (LLMEngine, "step")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    clock = StepClock()
    llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), use_tqdm=False)
    assert 2 <= len(clock.steps) == len(clock.inside)
    assert all(0 < inside < step for inside, step in zip(clock.inside, clock.steps, strict=True))
