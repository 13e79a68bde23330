"""OpenVINO GenAI as a peer: plain, with prompt lookup, or with a draft model or EAGLE-3 head, which drafts trees too.

It reads the target, and what drafts, as folders that optimum-intel exported of the same checkpoints.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openvino_genai as genai
import torch
from openvino import Tensor

from specdec.bench.peers import PeerSetup
from specdec.bench.timed_run import TimedRun, TimedSample
from specdec.core.outputs import SpeculationStats

MODEL = "openvino_model.xml"
PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
# Tokens in a block of the cache on CPUs.
BLOCK = 32
# Longest text whose earlier occurrence prompt lookup continues.
NGRAM_SIZE = 3


@dataclass
class _Answer:
    """One prompt and what was generated after it.

    Attributes:
        handle: its request.
        first, last: seconds to the first token, and to the last so far.
    """

    prompt: list[int]
    handle: Any = None
    tokens: list[int] = field(default_factory=list)
    first: float = 0.0
    last: float = 0.0
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    def take(self, now: float) -> None:
        """Take the tokens that the last step yielded, if any."""
        new: list[int] = []
        while self.handle.can_read():
            new += self.handle.read()[0].generated_ids
        if not new:
            return
        if self.tokens:
            self.stats.count(len(new) - 1, len(new), 0)
        else:
            self.first = now
        self.tokens += new
        self.last = now


class OpenVinoPeer:
    """Continuous batching on the CPU, without prefix cache; a prompt takes the place of one that has ended."""

    def __init__(self, setup: PeerSetup) -> None:
        self._setup = setup
        drafting, entries = _drafting(setup)
        has_trees = "tree_depth" in drafting
        # OpenVINO GenAI 2026.4.1 fails on the trees of several requests.
        self._seats = setup.number("batch", 1 if has_trees else 8)
        target = _folder(setup, setup.settings.get("ir"))
        if setup.dtype not in PRECISIONS:
            raise setup.error(f"OpenVINO cannot compute in {setup.dtype}; dtype must be one of {', '.join(PRECISIONS)}")
        properties: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": PRECISIONS[setup.dtype],
            # Not every CPU's kernels take bfloat16, and 2026.4.1 spoils float16 where it accepts branches of trees.
            "KV_CACHE_PRECISION": "f32" if has_trees or setup.dtype == "float32" else "f16",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        }
        head = None if setup.draft in (None, "ngram") else _folder(setup, setup.draft)
        if setup.draft == "ngram":
            properties["prompt_lookup"] = True
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_seqs = self._seats
        scheduler.max_num_batched_tokens = self._seats * (setup.longest + entries)
        # Where blocks are too few, drafts are left out and nothing is said.
        scheduler.num_kv_blocks = self._seats * (1 + (setup.longest + entries) // BLOCK)
        scheduler.enable_prefix_caching = False
        # A head needs the hidden states of whole prompts.
        scheduler.dynamic_split_fuse = head is None
        try:
            if head:
                properties["draft_model"] = genai.draft_model(str(head), "CPU")
            self._pipeline = genai.ContinuousBatchingPipeline(str(target), scheduler, "CPU", properties)
        except RuntimeError as error:
            raise setup.error(f"OpenVINO cannot load these folders: {_line(error)}") from None
        self._config = genai.GenerationConfig(
            do_sample=False,
            max_new_tokens=setup.max_tokens,
            ignore_eos=not setup.end_tokens,
            stop_token_ids=set(setup.end_tokens),
            **drafting,
        )

    def run(self, prompts: Sequence[list[int]], arrivals: Sequence[float] | None = None) -> TimedRun:  # noqa: ARG002
        """Answer prompts that arrive at once."""
        answers = [_Answer(prompt) for prompt in prompts]
        start = time.perf_counter()
        try:
            self._answer(answers, start)
        except RuntimeError as error:
            raise self._setup.error(f"OpenVINO failed: {_line(error)}") from None
        seconds = time.perf_counter() - start
        samples = [TimedSample(self._setup.cut(one.tokens), one.first, one.last, one.stats) for one in answers]
        return TimedRun(samples, seconds)

    def _answer(self, answers: Sequence[_Answer], start: float) -> None:
        waiting, running = list(enumerate(answers))[::-1], list[_Answer]()
        while waiting or running:
            while waiting and len(running) < self._seats:
                number, one = waiting.pop()
                ids = Tensor(np.array([one.prompt], dtype=np.int64))
                one.handle = self._pipeline.add_request(number, ids, self._config)
                running.append(one)
            self._pipeline.step()
            now = time.perf_counter() - start
            for one in list(running):
                one.take(now)
                status = one.handle.get_status()
                if status == genai.GenerationStatus.RUNNING:
                    continue
                if status != genai.GenerationStatus.FINISHED:
                    raise RuntimeError(f"a request of {len(one.prompt)} tokens ended as {status.name}")
                running.remove(one)


load = OpenVinoPeer


def _drafting(setup: PeerSetup) -> tuple[dict[str, int], int]:
    """Return what a request is told of drafts, and the most cache entries that they take."""
    bounds = [name for name in ("branching", "depth") if name in setup.settings]
    if bounds and setup.draft in (None, "ngram"):
        raise setup.error(f"{bounds[0]} is for trees, which need a head; name its folder")
    if setup.draft is None:
        return {}, 0
    if setup.draft == "ngram":
        tokens = setup.number("tokens", 10)
        return {"num_assistant_tokens": tokens, "max_ngram_size": NGRAM_SIZE}, tokens
    if not bounds:
        tokens = setup.number("tokens", 3)
        return {"num_assistant_tokens": tokens}, tokens
    tokens, branching, depth = setup.number("tokens", 8), setup.number("branching", 3), setup.number("depth", 4)
    tree = {"num_assistant_tokens": tokens, "branching_factor": branching, "tree_depth": depth}
    # The candidates of each level copy the blocks that they write to, and may go on in the next.
    return tree, tokens + 2 * BLOCK * branching * (branching + depth)


def _folder(setup: PeerSetup, name: str | None) -> Path:
    """Return a folder with an exported model."""
    if name is None:
        raise setup.error(f"needs the target as exported by optimum-intel; write {setup.label}:ir=FOLDER")
    if not (Path(name) / MODEL).is_file():
        raise setup.error(f"{name}: no {MODEL} in it; ir and heads are folders that optimum-intel exported")
    return Path(name)


def _line(error: RuntimeError) -> str:
    """Return what an error says, without the places in OpenVINO's source that precede it."""
    return str(error).strip().splitlines()[-1]
