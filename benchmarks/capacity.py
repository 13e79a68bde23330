"""Capacity of a replica: a model of memory, steps, drafts and network."""

from collections.abc import Sequence
from dataclasses import dataclass


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, bytes_per_value: int) -> int:
    """Return the bytes of one token's keys and values."""
    return 2 * layers * kv_heads * head_dim * bytes_per_value


def cache_tokens(memory: float, weights: float, kv_bytes: float) -> int:
    """Return the tokens whose keys and values fit beside the weights, all in bytes."""
    return max(0, int((memory - weights) / kv_bytes))


def _at(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Interpolate between points; beyond the last one go on along the last two."""
    if len(xs) == 1 or x <= xs[0]:
        return ys[0]
    last = next((index for index, each in enumerate(xs) if each >= x), len(xs) - 1)
    slope = (ys[last] - ys[last - 1]) / (xs[last] - xs[last - 1])
    return ys[last] + slope * (x - xs[last])


@dataclass(frozen=True)
class Costs:
    """Costs of a replica.

    Attributes:
        batches: numbers of decoding requests at which the next three were measured.
        plain: seconds of a plain step.
        cycle: c, the time of a step with drafts over that of a plain one.
        tau: tokens per request that a step with drafts yields.
        token: seconds per prompt token.
        overhead: seconds per request outside the engine: HTTP, tokens, text.
        network: seconds from the router to a replica, and bytes per second between them.
    """

    batches: tuple[int, ...]
    plain: tuple[float, ...]
    cycle: tuple[float, ...]
    tau: tuple[float, ...]
    token: float
    overhead: float = 0.0
    network: tuple[float, float] = (0.0, float("inf"))

    def step(self, rows: int, prompt_tokens: int) -> float:
        """Return the seconds of a step with some decoding requests and some tokens of prompts."""
        decoding = _at(self.batches, self.plain, rows) * _at(self.batches, self.cycle, rows) if rows else 0.0
        # A step of prompts alone has a plain step's fixed costs, which are most of that of one row.
        return max(decoding, self.plain[0]) + self.token * prompt_tokens

    def tokens_per_row(self, rows: int) -> float:
        """Return tau while `rows` requests decode: at least 1, at most the largest that was measured."""
        most = max(self.tau)
        return min(most, max(1.0, _at(self.batches, self.tau, rows)))

    def transfer(self, num_bytes: float) -> float:
        """Return the seconds in which a message reaches a replica."""
        latency, bandwidth = self.network
        return latency + num_bytes / bandwidth

    def requests_per_second(self, rows: int, uncached: float, answer: float) -> float:
        """Return the requests per second that a replica serves while `rows` requests decode.

        Args:
            uncached: prompt tokens of a request that are computed.
            answer: tokens of an answer.
        """
        decoding = (answer - 1) / self.tokens_per_row(rows) * self.step(rows, 0) / rows
        return 1 / (uncached * self.token + decoding)


def roofline_costs(
    batches: tuple[int, ...], weights: float, parameters: float, kv_read: float, bandwidth: float, flops: float
) -> Costs:
    """Return costs without drafts, if weights and cache are read once per step and nothing else takes time.

    Args:
        weights: bytes.
        kv_read: bytes of the cache that a decoding request reads per step.
        bandwidth, flops: bytes and operations per second.
    """
    steps = (max((weights + rows * kv_read) / bandwidth, 2 * parameters * rows / flops) for rows in batches)
    ones = (1.0,) * len(batches)
    return Costs(batches, tuple(steps), ones, ones, 2 * parameters / flops)
