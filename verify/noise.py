"""Gumbel noise that every output position of a request has of its own, whoever asks and in whatever order."""

from collections import OrderedDict
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor


class Stream(IntEnum):
    """What a draw is for. Streams are independent of each other, so no use of one biases another."""

    TARGET = 0
    DRAFT = 1
    COIN = 2
    RESIDUAL = 3


class GumbelNoise:
    """G(seed, sample index, position, .) over the vocabulary, standard Gumbel, float32.

    Counter-based (Philox 4x64, Salmon et al. 2011): the key is (seed, sample index), position and stream are
    the counter's highest words. The draw is thus a function of its arguments alone, which is what makes sampled
    speculation invisible (Gumbel-max coupling, Daliri et al. 2024).

    Recently asked positions are kept, since drafting and verification ask for the same ones.

    Args:
        vocab_size: entries of a noise vector.
        cache_bytes: memory for kept vectors.
    """

    def __init__(self, vocab_size: int, device: torch.device, cache_bytes: int = 64 << 20) -> None:
        self.vocab_size = vocab_size
        # One piece of memory for all: as many small ones would lie between everything else that comes and goes.
        self._vectors = torch.empty(max(64, cache_bytes // (4 * vocab_size)), vocab_size, device=device)
        self._free = list(range(len(self._vectors)))
        self._kept: OrderedDict[tuple[int, int, int, Stream, int], int] = OrderedDict()

    def at(self, seed: int, sample_index: int, position: int, stream: Stream = Stream.TARGET, lane: int = 0) -> Tensor:
        """float32 `[vocab_size]` noise of output position `position` (0 is the first generated token).

        Valid until the 64th call from now, when its memory may be used again.
        """
        key = (seed, sample_index, position, stream, lane)
        place = self._kept.get(key)
        if place is None:
            place = self._free.pop() if self._free else self._kept.popitem(last=False)[1]
            self._vectors[place] = gumbel(seed, sample_index, position, self.vocab_size, stream, lane)
            self._kept[key] = place
        else:
            self._kept.move_to_end(key)
        return self._vectors[place]


def gumbel(
    seed: int, sample_index: int, position: int, size: int, stream: Stream = Stream.TARGET, lane: int = 0
) -> Tensor:
    """Standard Gumbel variates `-log(-log(u))`, float32 `[size]`.

    With v = 1 - u on a grid of 2^-32 offset by half a step, -log(u) is -log1p(-v): the large variates, which
    decide an argmax, come from small v, where float32 is at its finest; none is infinite.

    Args:
        lane: tells independent vectors of one position and stream apart.
    """
    words = _philox(seed, sample_index, position, stream, lane).random_raw((size + 1) // 2).view(np.uint32)[:size]
    v = torch.from_numpy(words.astype(np.float32)).add_(0.5).mul_(2.0**-32)
    # The largest words round up to v = 1 in float32.
    v.clamp_(max=1 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()


def uniforms(seed: int, sample_index: int, position: int, count: int, stream: Stream = Stream.COIN) -> list[float]:
    """Independent uniform variates in [0, 1), on a grid of 2^-53: none is 1, as some in float32 would be."""
    words = _philox(seed, sample_index, position, stream).random_raw(count)
    values: list[float] = ((words >> np.uint64(11)) * 2.0**-53).tolist()
    return values


def _philox(seed: int, sample_index: int, position: int, stream: Stream, lane: int = 0) -> np.random.Philox:
    return np.random.Philox(counter=[0, lane, int(stream), position], key=[seed, sample_index])
