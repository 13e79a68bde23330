"""Limits and order of the scheduler."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from specdec.kernels.types.settings import check_settings, setting

Policy = Literal["fcfs", "priority"]


@dataclass(frozen=True)
class SchedulerConfig:
    """Settings by vLLM's names where it has them; `check_settings` refuses values outside their range."""

    PANEL: ClassVar[str] = "Engine"

    max_num_seqs: int = setting(64, "Most requests running at once.", least=1)
    max_num_batched_tokens: int = setting(
        2048, "Most tokens in a step, drafts included; longer prompts are split.", least=1
    )
    max_num_partial_prefills: int = setting(
        1, "Most prompts being prefilled at once that take several steps each.", least=1
    )
    long_prefill_token_threshold: int = setting(
        0, "Most tokens of one prompt in a step; 0: no limit but the step's.", least=0, wanted="at least 1, or 0"
    )
    scheduling_policy: Policy = setting(
        "fcfs", "Order of requests: fcfs (clients by turns), or priority (lowest first).", flags="", panel="Server"
    )
    prefill_stretch: float = setting(
        1.75,
        "Longest allowed step while others decode, as a multiple of its time without prompts, by measured costs; each "
        "further prompt adds as much; 0: no limit.",
        wanted="above 1, or 0 for no limit",
        least=0,
    )
    adaptive_drafts: bool = setting(
        True,
        "Size draft trees for the highest throughput at the current load, by measured costs; else the largest allowed.",
        flags="--adaptive-drafts/--fixed-drafts",
        panel="Drafts",
        shown_default="adaptive",
    )
    watermark: float = setting(
        0.01, "Share of the cache's blocks that an admission leaves free for running requests.", least=0, below=1
    )
    max_queued_requests: int | None = setting(
        None,
        "Most waiting requests; each client's first does not count. Others get 503.",
        least=1,
        wanted="at least 1, or None",
        flags="",
        panel="Server",
        shown_default="no limit",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}; "
                "every running request needs a token of the step"
            )
        if 0 < self.prefill_stretch <= 1:
            raise ValueError(f"prefill_stretch is {self.prefill_stretch}; it must be above 1, or 0 for no limit")

    @property
    def is_fitted(self) -> bool:
        """True if step sizes depend on measured costs."""
        return self.adaptive_drafts or self.prefill_stretch > 0
