"""Behaviour that depends on the processor, on each processor that this one can simulate.

Torch and oneDNN choose their code by `ATEN_CPU_CAPABILITY` and `ONEDNN_MAX_CPU_ISA`, which they read when torch is
imported. So `test_older_processors` runs the tests listed in `DEPENDENT` in a process of its own for each older
processor, where `torch.cpu._is_avx512_bf16_supported`, which asks the hardware itself, is replaced as well.
To look into a failure, set the variables by hand, as in `ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 pytest …`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specdec import LLM, SamplingParams
from specdec.core.device import resolve_dtype
from specdec.kernels.reference.projection import is_bfloat16_fast, onednn_multiplies
from tests.profiles import by_day
from tests.specdec.tiny_checkpoints import Tiny

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
# Instruction sets as torch names them, from old to new, and what oneDNN may use of each.
PROCESSORS = {"DEFAULT": "SSE41", "AVX2": "AVX2", "AVX512": "AVX512_CORE"}
THIS = torch.backends.cpu.get_cpu_capability()
OLDER = list(PROCESSORS)[: list(PROCESSORS).index(THIS) + 1] if THIS in PROCESSORS else []
DEPENDENT = [
    "tests/kernels/test_linear.py",
    "tests/train_eagle/test_head_trainer.py::test_in_bfloat16_products_meet_few_row_counts",
    *(
        f"tests/specdec/test_processors.py::{name}"
        for name in ("test_the_processor_is_the_one_asked_for", "test_auto_dtype", "test_drafts_change_no_token")
    ),
]
PRETENDING = """
import sys, torch, pytest
torch.cpu._is_avx512_bf16_supported = lambda: False
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.long
@pytest.mark.parametrize("capability", by_day(OLDER, 1))
def test_older_processors(capability: str) -> None:
    asked = {"ATEN_CPU_CAPABILITY": capability.lower(), "ONEDNN_MAX_CPU_ISA": PROCESSORS[capability]}
    # The addopts of pyproject.toml may ask for workers.
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib", "-m", "not nightly"]
    command = [sys.executable, "-c", PRETENDING, *options, *DEPENDENT]
    run = subprocess.run(command, cwd=ROOT, env={**os.environ, **asked}, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert "failed" not in run.stdout
    assert "skipped" not in run.stdout


def test_the_processor_is_the_one_asked_for() -> None:
    asked = (os.environ.get("ATEN_CPU_CAPABILITY") or THIS).upper()
    assert asked == THIS
    if asked != "AVX512" and os.environ.get("ONEDNN_MAX_CPU_ISA") == PROCESSORS.get(asked):
        assert not onednn_multiplies(torch.bfloat16, CPU)


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("instructions", [True, False])
def test_auto_dtype(onednn: bool, instructions: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (resolve_dtype("auto", CPU) == torch.bfloat16) == is_bfloat16_fast(CPU)
    assert not is_bfloat16_fast(CPU) or torch.cpu._is_avx512_bf16_supported()
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    monkeypatch.setattr("specdec.kernels.reference.projection.onednn_multiplies", lambda *_: onednn)
    assert resolve_dtype("auto", CPU) == (torch.bfloat16 if onednn and instructions else torch.float32)


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_drafts_change_no_token(tiny: Tiny, dtype: str) -> None:
    """Tokens are equal in float32; in bfloat16, where row counts change roundings, both runs generate to the end."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    tokens = []
    for head in (None, tiny.head):
        llm = LLM(tiny.target, head, dtype=dtype, device="cpu", adaptive_drafts=False)
        tokens.append([output.token_ids for output in llm.generate(["Hello", "What is 2 + 2?"], params)])
    assert [len(ids) for ids in tokens[0] + tokens[1]] == [24] * 4
    if llm.config.dtype == "float32":
        assert tokens[0] == tokens[1]
