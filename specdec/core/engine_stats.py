"""What an operator asks of a running engine."""

from dataclasses import dataclass


@dataclass
class EngineStats:
    """Counts since the start, and the state after the last step.

    Attributes:
        running, waiting, swapped: requests; those swapped out wait, too.
        kv_usage: share of the cache's blocks that are held.
        steps: forward passes of the target.
        known_tokens: tokens of prompts and outputs that passed the target.
        step_tokens: tokens of the last step, known ones and drafts granted.
        generated_tokens: tokens that requests got.
        preemptions: requests whose memory was taken away; of those, `swaps` went to host memory.
        prefix_queries: tokens of admitted requests.
        prefix_hits: of those, tokens found in the cache.
        drafts_asked, drafts_granted: draft nodes the tree's bounds ask for, and the step had room for.
        drafts_verified, drafts_accepted: nodes that were drafted, and that were kept.
        queued, finished, aborted: requests ever added, ended by themselves, ended from outside.
    """

    running: int = 0
    waiting: int = 0
    swapped: int = 0
    kv_usage: float = 0.0
    steps: int = 0
    known_tokens: int = 0
    step_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    drafts_asked: int = 0
    drafts_granted: int = 0
    drafts_verified: int = 0
    drafts_accepted: int = 0
    queued: int = 0
    finished: int = 0
    aborted: int = 0
