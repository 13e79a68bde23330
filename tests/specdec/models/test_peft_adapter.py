"""An adapter that PEFT itself has written, and the logits that PEFT computes with it."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specdec import LLM, LoRARequest, SamplingParams
from specdec.execution.step_order import StepOutcome
from tests.peft_adapter.make import FOLDER, TOKENS, base_model


def logits_of(target: Path, adapter: Path | None, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The logits after each token."""
    llm = LLM(target, None, dtype="float64", enable_lora=True)
    outcomes: list[StepOutcome] = []
    collect = llm.engine.executor.collect

    def kept() -> StepOutcome:
        outcomes.append(collect())
        return outcomes[-1]

    monkeypatch.setattr(llm.engine.executor, "collect", kept)
    request = None if adapter is None else LoRARequest("peft", 1, str(adapter))
    llm.generate([TOKENS], SamplingParams(max_tokens=1, prompt_logprobs=0), lora_request=request, use_tqdm=False)
    assert outcomes[0].logits is not None
    return outcomes[0].logits.clone()


def test_its_logits_are_pefts_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All projections, ranks 2, 5 and 8, rank-stabilised, with scales of their own."""
    base_model().save_pretrained(tmp_path)
    expected = torch.tensor(json.loads((FOLDER / "logits.json").read_text()), dtype=torch.float64)
    torch.testing.assert_close(logits_of(tmp_path, FOLDER, monkeypatch), expected, rtol=0, atol=1e-9)
    assert (logits_of(tmp_path, None, monkeypatch) - expected).abs().max() > 0.1
