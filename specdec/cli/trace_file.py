"""The file of `specdec generate --trace`: one JSON object per step and line."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from specdec.core.outputs import RequestOutput
from specdec.core.sampling_params import SamplingParams
from specdec.core.step_report import StepReporter

if TYPE_CHECKING:
    from specdec.llm import LLM


class TraceFile:
    """A file that gets the steps of a batch as they come.

    Each line has the fields of `StepReport`, and before them `prompt` and `step`: the number of the prompt, and of the
    step within its answer, both from 0.

    Args:
        params: parameters of all prompts.

    Raises:
        ValueError: the file cannot be written; at the end of its context, if that shows later.
    """

    def __init__(self, file: Path, llm: "LLM", params: SamplingParams) -> None:
        self._file = file
        self._error: OSError | None = None
        try:
            self._lines = file.open("w", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--trace {file}: cannot be written: {error.strerror}; name another file") from None
        self._tokenizer, self._params = llm.tokenizer.backend if llm.tokenizer else None, params
        # By prompt.
        self._reporters: dict[int, StepReporter] = {}
        self._num_steps: Counter[int] = Counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._lines.close()
        except OSError as failed:
            self._error = failed
        if self._error is not None and kind is None:
            raise ValueError(f"--trace {self._file}: cannot be written: {self._error.strerror}")

    def add(self, prompt: int, output: RequestOutput) -> None:
        """Write the steps that a state of a prompt's request has and the one before had not.

        If that fails, the answers go on, and leaving the context raises the error.
        """
        try:
            self._add(prompt, output)
        except OSError as error:
            self._error = error

    def _add(self, prompt: int, output: RequestOutput) -> None:
        if prompt not in self._reporters:
            self._reporters[prompt] = StepReporter(self._tokenizer, self._params)
        for report in self._reporters[prompt].new_steps(output.outputs[0]):
            place = {"prompt": prompt, "step": self._num_steps[prompt]}
            self._lines.write(json.dumps({**place, **asdict(report)}, allow_nan=False) + "\n")
            self._num_steps[prompt] += 1
