"""Requests without text, and a cache memory whose entries record which tokens they were written for."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from specdec.cache.block_moves import BlockMove
from specdec.cache.kv_cache import runs_of
from specdec.cache.kv_cache_manager import KVCacheManager
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.text.detokenizer import Detokenizer
from specdec.verify.sampling import Sampling

SIZE = 4


class FakeMemory:
    """Entries of the target (0) and of the head (1) by block and offset. None is an entry that was never written."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.size, self.window = manager.block_size, manager.kept.window
        self.device = [[[None] * self.size, [None] * self.size] for _ in range(manager.pool.num_blocks)]

    def apply_moves(
        self, moves: list[BlockMove], load: Callable[[Sequence[int], Sequence[int]], None] | None = None
    ) -> None:
        for run in runs_of(moves):
            if run[0].is_load:
                assert load is not None
                load([move.source for move in run], [move.target for move in run])
                continue
            for move in run:
                self.device[move.target] = deepcopy(self.device[move.source])

    def write(self, request: Request, start: int, end: int, head: bool = False, content: Any = None) -> None:
        """Write entries `start` to `end`: what follows from the request's tokens, or `content`."""
        for entry in range(start, end):
            block = self.device[request.block_table[entry // self.size]]
            block[head][entry % self.size] = content or self.right(request, entry)

    def right(self, request: Request, entry: int) -> tuple[str | None, tuple[int, ...]]:
        """Return the content of an entry: the salt and all tokens up to its own, nothing else."""
        return request.cache_salt, tuple(request.token_ids[: entry + 1])

    def check(self, request: Request) -> None:
        """Assert that all entries that count as cached and may be read hold the request's own content.

        Of the target these are the last ones within the window, of the head those from `draft_start` on.
        """
        table, blocks = request.block_table, self.device
        first = max(0, request.num_cached + 1 - self.window) if self.window else 0
        parts = ((0, first, request.num_cached), (1, request.draft_start, request.num_draft_cached))
        for head, start, end in parts:
            for entry in range(start, end):
                found = blocks[table[entry // self.size]][head][entry % self.size]
                assert found == self.right(request, entry), f"entry {entry}"


def make_request(token_ids: list[int], max_tokens: int = 20, num_prompt: int | None = None, **fields: Any) -> Request:
    """Make a request without text."""
    num_prompt = len(token_ids) if num_prompt is None else num_prompt
    rest = {"request_id": str(token_ids), "params": SamplingParams(seed=0), "end_tokens": frozenset(), **fields}
    return Request(
        token_ids=list(token_ids),
        num_prompt=num_prompt,
        sampling=Sampling(),
        max_length=num_prompt + max_tokens,
        detokenizer=Detokenizer(None, ()),
        **rest,
    )
