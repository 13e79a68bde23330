"""The tiny model, as an engine and by transformers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from specdec import LLM
from tests.specdec.core.tiny_llm import load
from tests.specdec.tiny_checkpoints import Tiny


@pytest.fixture(scope="module")
def llm(tiny: Tiny) -> LLM:
    return load(tiny.target, tiny.head)


@pytest.fixture(scope="module")
def target(tiny: Tiny) -> Callable[[list[int]], Tensor]:
    """Logits `[tokens, vocab]` of the tiny model, by transformers."""
    model = LlamaForCausalLM.from_pretrained(tiny.target, dtype=torch.float64).eval()

    def logits(tokens: list[int]) -> Tensor:
        with torch.inference_mode():
            scores: Tensor = model(torch.tensor([tokens])).logits[0]
        return scores

    return logits
