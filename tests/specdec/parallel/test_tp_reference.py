"""The tensor-parallel split beside that of torch and transformers."""

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from specdec import LLM
from tests.fakes import save_random_llama
from tests.specdec.parallel.parallelized import LOGITS, SIZE
from tests.specdec.parallel.ranked_engine import PROMPT, prompt_logits
from tests.specdec.parallel.thread_ranks import thread_ranks

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_logits_are_those_of_parallelize_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both on two gloo ranks, in float64. Torch's are processes, since its groups are global."""
    save_random_llama(tmp_path, attention_bias=True)
    command = [sys.executable, "-m", "tests.specdec.parallel.parallelized", tmp_path, *map(str, PROMPT)]
    with subprocess.Popen(command) as process:
        with thread_ranks(), LLM(tmp_path, None, dtype="float64", prefill_stretch=0, tensor_parallel_size=SIZE) as llm:
            found = prompt_logits(llm, monkeypatch)
        assert process.wait(120) == 0
    reference = load_file(tmp_path / LOGITS)[LOGITS]
    assert found.shape == reference.shape
    assert (found - reference).abs().max() < 1e-9
