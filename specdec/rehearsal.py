"""The largest steps an engine may have, run once to see what memory they need."""

from dataclasses import dataclass

from specdec.config import EngineConfig
from specdec.detokenizer import Detokenizer
from specdec.engine import LLMEngine
from specdec.request import Request
from specdec.sampling_params import SamplingParams
from specdec.verify.sampling import Sampling

# The prompts' own step, and one with drafts behind each.
STEPS = 2


@dataclass(frozen=True)
class Rehearsal:
    """As many requests as may run, with prompts as long as fit one step together, and drafts after that.

    They are sampled with top_p, which takes the most memory.

    Args:
        longest: tokens a request may come to.
        slots: cache entries of a request's draft tree.
    """

    config: EngineConfig
    longest: int
    slots: int

    @property
    def prompt_length(self) -> int:
        limits = self.config.scheduler
        return max(1, min(limits.max_num_batched_tokens // limits.max_num_seqs, self.longest - STEPS - 1))

    @property
    def num_blocks(self) -> int:
        """That no request of it waits for."""
        entries = self.prompt_length + STEPS * (1 + self.slots)
        # The scheduler keeps a share free.
        each = -(-entries // self.config.block_size)
        return 2 * each * self.config.scheduler.max_num_seqs

    def run(self, engine: LLMEngine) -> None:
        """Run it on an engine that has nothing else to do, and leave nothing behind."""
        requests = [self._request(index) for index in range(self.config.scheduler.max_num_seqs)]
        for request in requests:
            engine.add_request(request)
        for _ in range(STEPS):
            engine.step()
        for request in requests:
            engine.abort(request)

    def _request(self, index: int) -> Request:
        length = self.prompt_length
        return Request(
            request_id=f"rehearsal-{index}",
            token_ids=[0] * length,
            num_prompt=length,
            params=SamplingParams(seed=0),
            sampling=Sampling(temperature=1.0, top_p=0.5),
            max_length=min(self.longest, length + STEPS + 1 + self.slots),
            end_tokens=frozenset(),
            detokenizer=Detokenizer(None, ()),
            # None finds the beginning of another.
            cache_salt=str(index),
        )
