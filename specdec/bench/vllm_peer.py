"""vLLM as a peer: plain, with its n-gram drafts, or with an EAGLE-3 head."""

import time
from collections.abc import Sequence
from typing import Any

from vllm import LLM, SamplingParams

from specdec.bench.peers import PeerSetup
from specdec.bench.timed_run import TimedRun, TimedSample
from specdec.core.outputs import SpeculationStats

ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos"
STEPS = "vllm:spec_decode_num_drafts"
NODES = "vllm:spec_decode_num_draft_tokens"


class VllmPeer:
    """vLLM's offline engine, without prefix cache."""

    def __init__(self, setup: PeerSetup) -> None:
        self._draft = setup.draft
        settings: dict[str, Any] = {}
        if setup.draft is not None:
            tokens = setup.number("tokens", 3)
            settings["speculative_config"] = {"num_speculative_tokens": tokens, **_drafting(setup.draft)}
        self._llm = LLM(
            model=str(setup.model),
            dtype=setup.dtype,
            max_model_len=setup.longest,
            max_num_seqs=setup.number("batch", 64),
            enable_prefix_caching=False,
            disable_log_stats=False,
            **settings,
        )
        self._params = SamplingParams(
            temperature=0,
            max_tokens=setup.max_tokens,
            ignore_eos=not setup.end_tokens,
            stop_token_ids=sorted(setup.end_tokens),
            detokenize=False,
        )

    def run(self, prompts: Sequence[list[int]], arrivals: Sequence[float] | None = None) -> TimedRun:  # noqa: ARG002
        """Answer prompts that arrive at once."""
        before = self._counts()
        start = time.perf_counter()
        outputs = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], self._params, use_tqdm=False)
        seconds = time.perf_counter() - start
        samples = []
        for output in outputs:
            clock = output.metrics
            first = clock.first_token_latency
            whole = first + clock.last_token_ts - clock.first_token_ts
            samples.append(TimedSample(list(output.outputs[0].token_ids), first, whole))
        if self._draft is not None:
            # vLLM counts for all requests together.
            after = self._counts()
            samples[0].stats.add(_difference(after, before))
        return TimedRun(samples, seconds)

    def _counts(self) -> SpeculationStats:
        """Return vLLM's counts since its start."""
        counts = SpeculationStats()
        if self._draft is not None:
            for metric in self._llm.get_metrics():
                if metric.name == STEPS:
                    counts.steps += int(metric.value)
                elif metric.name == NODES:
                    counts.drafted += int(metric.value)
                elif metric.name == ACCEPTED:
                    counts.accepted_per_depth = [int(value) for value in metric.values]
            counts.tokens = counts.steps + sum(counts.accepted_per_depth)
        return counts


load = VllmPeer


def _drafting(draft: str) -> dict[str, Any]:
    if draft == "ngram":
        return {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}
    return {"method": "eagle3", "model": draft}


def _difference(after: SpeculationStats, before: SpeculationStats) -> SpeculationStats:
    earlier = before.accepted_per_depth + [0] * (len(after.accepted_per_depth) - len(before.accepted_per_depth))
    return SpeculationStats(
        after.steps - before.steps,
        after.tokens - before.tokens,
        [new - old for new, old in zip(after.accepted_per_depth, earlier, strict=True)],
        after.drafted - before.drafted,
    )
