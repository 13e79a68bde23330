"""Argmax and top k of scores with noise on a CPU: each vector of noise is made once and kept for the next use."""

from torch import Tensor

from specdec.kernels.reference.noise import GumbelNoise
from specdec.kernels.types.types import NO_TOKEN, Candidates, NoiseRows, Stream, TopK


class HostSampling:
    """The sampling operations of the plain-torch kernel set.

    Args:
        noise: makes the noise of a position, and keeps it for whatever asks for the same position next.
    """

    def __init__(self, noise: GumbelNoise) -> None:
        self.noise = noise

    def gumbel_argmax(self, scores: Tensor, noise: NoiseRows) -> Tensor:
        """Return the argmax of each row plus its noise; see `host_coupled_walk`."""
        for row, key in enumerate(noise.keys):
            if key is not None:
                scores[row] += self.noise.at(key, scores.shape[1], Stream.TARGET, 0)
        return argmax(scores)

    def perturbed_top_k(
        self, candidates: Candidates, noise: NoiseRows, k: int, stream: Stream = Stream.TARGET, lane: int = 0
    ) -> TopK:
        """See `SearchKernels.perturbed_top_k`."""
        scores, vocab_size, tokens = candidates
        for row, key in enumerate(noise.keys):
            if key is not None:
                own = self.noise.at(key, vocab_size, stream, lane)
                scores[row] += own if tokens is None else own[tokens]
        values, best = scores.topk(k)
        return TopK(best if tokens is None else tokens[best], values, scores.logsumexp(-1))


def argmax(scores: Tensor) -> Tensor:
    """Return the argmax of each row, int64 `[rows]`: the lowest id on ties, `NO_TOKEN` if the largest is not finite.

    Below float32, torch's own argmax takes several times as long as its max.
    """
    values, tokens = scores.max(-1)
    return tokens.masked_fill_(~values.isfinite(), NO_TOKEN)
