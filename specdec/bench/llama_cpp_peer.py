"""llama.cpp as a peer, through llama-cpp-python's low-level interface: plain, or with prompt lookup.

It reads the target as a GGUF file, made of the same checkpoint by llama.cpp's `convert_hf_to_gguf.py`.
"""

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import llama_cpp as lib
import numpy as np
import torch
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from specdec.bench.peers import GGUF, PeerSetup
from specdec.bench.timed_run import TimedRun, TimedSample
from specdec.core.outputs import SpeculationStats


@lib.llama_log_callback  # type: ignore[untyped-decorator]
def _silence(level: int, text: bytes, data: Any) -> None:
    """Take llama.cpp's log, which it else writes on standard error."""


@dataclass
class _Sequence:
    """One prompt in the batch.

    Attributes:
        index: its place among the prompts.
        text: prompt and answer.
        num_prompt: tokens of the prompt.
        num_cached: tokens in llama.cpp's cache.
        draft: tokens that are verified in the next step.
        first: seconds to the first token.
    """

    index: int
    text: list[int]
    num_prompt: int
    num_cached: int = 0
    draft: list[int] = field(default_factory=list)
    first: float = 0.0
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def answer(self) -> list[int]:
        return self.text[self.num_prompt :]


class LlamaCppPeer:
    """Continuous batching: a prompt takes the place of one that has ended."""

    def __init__(self, setup: PeerSetup) -> None:
        if setup.draft not in (None, "ngram"):
            raise ValueError(
                f"--peer {setup.label!r}: llama-cpp-python drafts by prompt lookup alone; write llama.cpp:ngram, "
                "or take llama-server"
            )
        self._setup = setup
        self._lookup = None if setup.draft is None else LlamaPromptLookupDecoding(2, setup.number("tokens", 10))
        self._seats = setup.number("batch", 8)
        lib.llama_log_set(_silence, ctypes.c_void_p(0))
        lib.llama_backend_init()
        file = setup.file("gguf", GGUF)
        self._model = lib.llama_model_load_from_file(str(file).encode(), lib.llama_model_default_params())
        if not self._model:
            raise ValueError(f"--peer {setup.label!r}: llama.cpp cannot load {file}")
        params = lib.llama_context_default_params()
        params.n_seq_max = self._seats
        params.n_ctx = params.n_batch = self._seats * setup.longest
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        self._context = lib.llama_init_from_model(self._model, params)
        self._memory = lib.llama_get_memory(self._context)
        self._batch = lib.llama_batch_init(params.n_batch, 0, 1)
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))

    def run(self, prompts: Sequence[list[int]], arrivals: Sequence[float] | None = None) -> TimedRun:  # noqa: ARG002
        """Answer prompts that arrive at once."""
        waiting = [_Sequence(index, list(prompt), len(prompt)) for index, prompt in enumerate(prompts)][::-1]
        running: dict[int, _Sequence] = {}
        samples: dict[int, TimedSample] = {}
        start = time.perf_counter()
        while waiting or running:
            for seat in range(self._seats):
                if waiting and seat not in running:
                    running[seat] = waiting.pop()
            self._step(running)
            now = time.perf_counter() - start
            for seat, one in list(running.items()):
                one.first = one.first or now
                tokens = self._setup.cut(one.answer)
                if len(tokens) < len(one.answer) or len(tokens) == self._setup.max_tokens or self._ended(tokens):
                    samples[one.index] = TimedSample(tokens, one.first, now, one.stats)
                    lib.llama_memory_seq_rm(self._memory, seat, -1, -1)
                    del running[seat]
        return TimedRun([samples[index] for index in range(len(prompts))], time.perf_counter() - start)

    def _ended(self, tokens: list[int]) -> bool:
        return tokens[-1] in self._setup.end_tokens

    def _step(self, running: dict[int, _Sequence]) -> None:
        """Compute what is not cached of every sequence, with its draft, and append what the logits accept."""
        batch, count = self._batch, 0
        scored: dict[int, int] = {}
        for seat, one in running.items():
            if self._lookup is not None and one.answer:
                one.draft = self._lookup(np.array(one.text, dtype=np.intc)).tolist()
                one.draft = one.draft[: self._setup.max_tokens - len(one.answer) - 1]
            tokens = one.text[one.num_cached :] + one.draft
            for place, token in enumerate(tokens):
                batch.token[count] = token
                batch.pos[count] = one.num_cached + place
                batch.n_seq_id[count] = 1
                batch.seq_id[count][0] = seat
                batch.logits[count] = place >= len(tokens) - len(one.draft) - 1
                count += 1
            scored[seat] = count - len(one.draft) - 1
        batch.n_tokens = count
        if code := lib.llama_decode(self._context, batch):
            raise ValueError(f"--peer {self._setup.label!r}: llama_decode failed with code {code}")
        for seat, one in running.items():
            self._take(seat, one, scored[seat])

    def _take(self, seat: int, one: _Sequence, row: int) -> None:
        """Append the target's tokens along the draft, and drop what is cached of its rejected rest."""
        chosen = [self._argmax(row)]
        while len(chosen) <= len(one.draft) and chosen[-1] == one.draft[len(chosen) - 1]:
            chosen.append(self._argmax(row + len(chosen)))
        if one.answer:
            one.stats.count(len(chosen) - 1, len(chosen), len(one.draft))
        one.text += chosen
        one.num_cached = len(one.text) - 1
        if len(chosen) <= len(one.draft):
            lib.llama_memory_seq_rm(self._memory, seat, one.num_cached, -1)
        one.draft = []

    def _argmax(self, row: int) -> int:
        logits = lib.llama_get_logits_ith(self._context, row)
        values = (ctypes.c_float * self._vocab_size).from_address(ctypes.addressof(logits.contents))
        return int(np.argmax(np.frombuffer(values, dtype=np.float32)))


def load(setup: PeerSetup) -> LlamaCppPeer:
    """Return the peer with its model loaded."""
    return LlamaCppPeer(setup)
