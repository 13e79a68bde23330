"""transformers' `generate` as a peer: plain, with prompt lookup, or with a small assistant model."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from specdec.bench.peers import PeerSetup
from specdec.bench.timed_run import TimedRun, TimedSample
from specdec.core.device import DTYPES
from specdec.core.outputs import SpeculationStats
from specdec.gguf.file import is_gguf

PAD = 0


class _Clock:
    """Streamer of `generate` that notes when tokens come and how many come at once."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.sizes: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        self.sizes.append(value.numel())

    def end(self) -> None:
        pass


class TransformersPeer:
    """Padded batches, in the order of the prompts; one prompt at a time with drafts, as `generate` requires."""

    def __init__(self, setup: PeerSetup) -> None:
        self._setup = setup
        self._drafting: dict[str, Any] = {}
        if setup.draft == "ngram":
            self._drafting["prompt_lookup_num_tokens"] = setup.number("tokens", 10)
        elif setup.draft is not None:
            self._drafting["assistant_model"] = _model(setup.draft, setup.dtype)
            self._drafting["assistant_model"].generation_config.num_assistant_tokens = setup.number("tokens", 5)
        self._batch = 1 if self._drafting else setup.number("batch", 8)
        self._model = _model(str(setup.model), setup.dtype)
        ends = sorted(setup.end_tokens) or None
        # The model's own file may ask for sampling.
        self._model.generation_config = GenerationConfig(
            do_sample=False, max_new_tokens=setup.max_tokens, eos_token_id=ends, pad_token_id=PAD
        )

    @torch.inference_mode()
    def run(self, prompts: Sequence[list[int]], arrivals: Sequence[float] | None = None) -> TimedRun:  # noqa: ARG002
        """Answer prompts that arrive at once."""
        start = time.perf_counter()
        samples: list[TimedSample] = []
        for first in range(0, len(prompts), self._batch):
            samples += self._generate(prompts[first : first + self._batch], start)
        return TimedRun(samples, time.perf_counter() - start)

    def _generate(self, prompts: Sequence[list[int]], start: float) -> list[TimedSample]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        clock = _Clock()
        rows = self._model.generate(ids, attention_mask=mask, streamer=clock, **self._drafting)[:, longest:].tolist()
        # The first call brings the prompts.
        times, sizes = clock.times[1:], [size // len(prompts) for size in clock.sizes[1:]]
        steps = [step for step, size in enumerate(sizes) for _ in range(size)]
        samples = []
        for row in rows:
            tokens = self._setup.cut(row)
            stats = SpeculationStats()
            for step in range(1, steps[len(tokens) - 1] + 1):
                stats.count(sizes[step] - 1, sizes[step], 0)
            samples.append(TimedSample(tokens, times[0] - start, times[steps[len(tokens) - 1]] - start, stats))
        return samples


load = TransformersPeer


def _model(name: str, dtype: str) -> Any:
    logging.disable_progress_bar()
    path = Path(name)
    folder, file = (path.parent, {"gguf_file": path.name}) if is_gguf(path) else (name, {})
    return AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], **file).eval()
