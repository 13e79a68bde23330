"""Gumbel noise as a pure function of request and output position, in any order of calls."""

from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.types import NoiseKey, Stream
from specdec.verify.sampling import Context


def noise_key(context: Context) -> NoiseKey:
    """Return the key of a request's next output position."""
    return NoiseKey(context.sampling.seed, context.sampling.sample_index, context.num_output)


class GumbelNoise:
    """Standard Gumbel noise G(seed, sample index, position, .) over the vocabulary, float32.

    Counter-based (Philox 4x64, Salmon et al. 2011): the key is (seed, sample index), position and stream are
    the counter's highest words. The draw is thus a function of its arguments alone, which is what makes sampled
    speculation invisible (Gumbel-max coupling, Daliri et al. 2024).

    Recent vectors are kept, since drafting and verification use the same ones.

    Args:
        cache_bytes: memory for kept vectors, allocated at the first call.
    """

    def __init__(self, device: torch.device, cache_bytes: int = 64 << 20) -> None:
        self.cache_bytes = cache_bytes
        self._vectors = torch.empty(0, 0, device=device)
        self._free: list[int] = []
        self._kept: OrderedDict[tuple[NoiseKey, Stream, int], int] = OrderedDict()

    def at(self, key: NoiseKey, size: int, stream: Stream = Stream.TARGET, lane: int = 0) -> Tensor:
        """Return the noise of an output position, float32 `[size]`.

        Valid until the 64th call from now, when its memory may be reused.

        Args:
            stream, lane: as in `gumbel`.
        """
        if size > self._vectors.shape[1]:
            # One allocation for all: many small ones would fragment memory.
            with torch.inference_mode(False):
                self._vectors = self._vectors.new_empty(max(64, self.cache_bytes // (4 * size)), size)
            self._free = list(range(len(self._vectors)))
            self._kept.clear()
        place = self._kept.get((key, stream, lane))
        if place is None:
            place = self._free.pop() if self._free else self._kept.popitem(last=False)[1]
            self._vectors[place] = gumbel(*key, self._vectors.shape[1], stream, lane)
            self._kept[key, stream, lane] = place
        else:
            self._kept.move_to_end((key, stream, lane))
        vector = self._vectors[place]
        return vector if len(vector) == size else vector[:size]

    @staticmethod
    def uniforms(key: NoiseKey, count: int, stream: Stream) -> list[float]:
        """Return `uniforms` of a key."""
        return uniforms(*key, count, stream)


def gumbel(
    seed: int, sample_index: int, position: int, size: int, stream: Stream = Stream.TARGET, lane: int = 0
) -> Tensor:
    """Return standard Gumbel variates `-log(-log(u))`, float32 `[size]`.

    With v = 1 - u on a grid of 2^-32 offset by half a step, -log(u) is -log1p(-v): the large variates, which
    decide an argmax, come from small v, where float32 is at its finest; none is infinite.

    Args:
        stream: what the noise is for.
        lane: distinguishes independent vectors of one position and stream.
    """
    words = _philox(seed, sample_index, position, stream, lane).random_raw((size + 1) // 2).view(np.uint32)[:size]
    v = torch.from_numpy(words.astype(np.float32)).add_(0.5).mul_(2.0**-32)
    # The largest words round up to v = 1 in float32.
    v.clamp_(max=1 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()


def uniforms(seed: int, sample_index: int, position: int, count: int, stream: Stream = Stream.COIN) -> list[float]:
    """Return independent uniform variates in [0, 1), on a grid of 2^-53: none is 1, as some in float32 would be."""
    words = _philox(seed, sample_index, position, stream).random_raw(count)
    values: list[float] = ((words >> np.uint64(11)) * 2.0**-53).tolist()
    return values


def _philox(seed: int, sample_index: int, position: int, stream: Stream, lane: int = 0) -> np.random.Philox:
    return np.random.Philox(counter=[0, lane, int(stream), position], key=[seed, sample_index])
