"""Limits and order of the scheduler."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

Policy = Literal["fcfs", "priority"]


@dataclass(frozen=True)
class SchedulerConfig:
    """By vLLM's names, where it has them; checks itself.

    Attributes:
        max_num_seqs: most requests running at once.
        max_num_batched_tokens: most tokens in a step, known ones and draft nodes; longer prompts are split.
        max_num_partial_prefills: most prompts under way at once that take several steps each.
        long_prefill_token_threshold: most tokens of one prompt in a step, 0 for no limit but the step's.
        scheduling_policy: "fcfs", or "priority": lower priorities first.
        prefill_stretch: beside rows that decode, a prompt gets as many tokens as make the step at most so many times as
            long, by measured costs, as it were without; each prompt more, under way or waiting, adds as much time. 0
            for no limit but the step's tokens.
        adaptive_drafts: whether trees have only as many nodes as repay what they cost at the load, by measured costs.
        watermark: share of the blocks that an admission leaves free, for the growth of those that run.
        max_queued_requests: most requests waiting; None for no limit.

    Raises:
        ValueError: a number outside its range.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_num_partial_prefills: int = 1
    long_prefill_token_threshold: int = 0
    scheduling_policy: Policy = "fcfs"
    prefill_stretch: float = 1.75
    adaptive_drafts: bool = True
    watermark: float = 0.01
    max_queued_requests: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_num_partial_prefills"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}; "
                "every running request needs a token of the step"
            )
        if self.long_prefill_token_threshold < 0:
            raise ValueError(
                f"long_prefill_token_threshold is {self.long_prefill_token_threshold}; it must be at least 1, or 0"
            )
        if self.scheduling_policy not in get_args(Policy):
            raise ValueError(f"scheduling_policy {self.scheduling_policy!r} is unknown; use fcfs or priority")
        if self.prefill_stretch != 0 and not 1 < self.prefill_stretch < math.inf:
            raise ValueError(f"prefill_stretch is {self.prefill_stretch}; it must be above 1, or 0 for no limit")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark is {self.watermark}; it must be at least 0 and below 1")
        if self.max_queued_requests is not None and self.max_queued_requests < 1:
            raise ValueError(f"max_queued_requests is {self.max_queued_requests}; it must be at least 1, or None")

    @property
    def is_fitted(self) -> bool:
        """Whether steps are fitted to measured costs."""
        return self.adaptive_drafts or self.prefill_stretch > 0
