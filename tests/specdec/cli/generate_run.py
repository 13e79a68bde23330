"""What a run of `specdec generate` in this process leaves."""

import io
import json
import re
from collections.abc import Callable
from typing import NamedTuple

import pytest

from specdec.core.request import Request
from specdec.engine.engine import LLMEngine

FIGURES = ["steps", "tau", "tree", "accepted_per_depth", "seconds", "tok_per_s"]
KEYS = ["prompt", "text", "token_ids", "finish_reason", "error", *FIGURES]
COMPARE_KEYS = [*KEYS, "plain_tok_per_s", "speedup", "equal"]
GREEN = re.compile("\x1b\\[32m(.*?)\x1b\\[0m", re.DOTALL)


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def objects(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.out.splitlines()]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


Run = Callable[..., Result]


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
