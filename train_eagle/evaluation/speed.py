"""Speed of answers with a head over answers without one, as `specdec generate` gives them."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from specdec.core.sampling_params import SamplingParams
from specdec.llm import LLM

WARM_UP_TOKENS = 8


class Speed(NamedTuple):
    """Tokens per second with a head, and without one."""

    drafted: float
    plain: float

    @property
    def over_plain(self) -> float:
        """Return the ratio of the two."""
        return self.drafted / self.plain


def measure_speed(
    drafting: LLM, plain: LLM, prompts: Sequence[list[int]], temperature: float, max_tokens: int
) -> Speed:
    """Answer prompts one at a time with both engines in turn, after a short answer of each that is not counted.

    Args:
        prompts: token ids, at least one prompt. Seeds are 0, 1, …
    """
    seconds, tokens = {drafting: 0.0, plain: 0.0}, {drafting: 0, plain: 0}
    warm_up = SamplingParams(temperature=temperature, seed=0, max_tokens=WARM_UP_TOKENS)
    for llm in seconds:
        llm.generate([prompts[0]], warm_up, use_tqdm=False)
    for seed, prompt in enumerate(prompts):
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
        # Whichever comes second may find the machine warmer, so they take turns at that too.
        for llm in (drafting, plain) if seed % 2 else (plain, drafting):
            began = time.perf_counter()
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            seconds[llm] += time.perf_counter() - began
            tokens[llm] += len(output.token_ids)
    return Speed(*(tokens[llm] / seconds[llm] for llm in (drafting, plain)))
