"""What a run of `specdec generate` in this process leaves."""

import io
import re

import pytest

from specdec.core.request import Request
from specdec.engine.engine import LLMEngine

FIGURES = ["steps", "tau", "tree", "accepted_per_depth", "seconds", "tok_per_s"]
KEYS = ["prompt", "text", "token_ids", "finish_reason", "error", *FIGURES]
COMPARE_KEYS = [*KEYS, "plain_tok_per_s", "speedup", "equal"]
GREEN = re.compile("\x1b\\[32m(.*?)\x1b\\[0m", re.DOTALL)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def interrupt_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Press Ctrl-C in the step after `steps` steps."""
    real, taken = LLMEngine.step, 0

    def step(engine: LLMEngine) -> list[Request]:
        nonlocal taken
        taken += 1
        if taken > steps:
            raise KeyboardInterrupt
        return real(engine)

    monkeypatch.setattr(LLMEngine, "step", step)
