"""The public names of `specdec`, and that importing it loads none of the slow packages."""

import subprocess
import sys

import pytest

import specdec

pytestmark = pytest.mark.slow

NAMES = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CheckpointError",
    "ChoiceScore",
    "CompletionOutput",
    "Counter",
    "DraftShape",
    "EngineDeadError",
    "EngineStats",
    "Gauge",
    "LoRARequest",
    "Logprob",
    "Metric",
    "ParameterError",
    "QueueFullError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "Segment",
    "Speculation",
    "SpeculationStats",
    "Step",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "TreeTrace",
    "Vector",
    "__version__",
]


def test_the_names_are_these() -> None:
    assert sorted(specdec.__all__) == sorted(NAMES)
    assert dir(specdec) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_resolves(name: str) -> None:
    value = getattr(specdec, name)
    assert isinstance(value, str) if name == "__version__" else value.__name__ == name


def test_another_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="Engine"):
        specdec.Engine  # noqa: B018


@pytest.mark.long
def test_nothing_is_printed_unless_logs_are_asked_for() -> None:
    code = """
import logging
from specdec import LLM, SamplingParams
llm = LLM(draft="eagle", adaptive_drafts=False, prefill_stretch=0)
llm.generate("Hello", SamplingParams(max_tokens=3))
assert logging.getLogger("specdec").level == logging.NOTSET
logging.getLogger("specdec.llm").warning("no program asked for this")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_import_is_quick() -> None:
    code = (
        "import sys, specdec; sys.exit(', '.join({'torch', 'transformers', 'typer', 'rich'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
