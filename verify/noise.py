"""Gumbel noise that every output position of a request has of its own, whoever asks and in whatever order."""

from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor


class GumbelNoise:
    """G(seed, sample index, position, .) over the vocabulary, standard Gumbel, float32.

    Counter-based (Philox 4x64, Salmon et al. 2011): the key is (seed, sample index), the position is the
    counter's highest word. The draw is thus a function of its arguments alone, which is what makes sampled
    speculation invisible (Gumbel-max coupling, Daliri et al. 2024).

    Recently asked positions are kept, since drafting and verification ask for the same ones.

    Args:
        vocab_size: entries of a noise vector.
        cache_bytes: memory for kept vectors.
    """

    def __init__(self, vocab_size: int, device: torch.device, cache_bytes: int = 64 << 20) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._capacity = max(64, cache_bytes // (4 * vocab_size))
        self._kept: OrderedDict[tuple[int, int, int], Tensor] = OrderedDict()

    def at(self, seed: int, sample_index: int, position: int) -> Tensor:
        """float32 `[vocab_size]` noise of output position `position` (0 is the first generated token)."""
        key = (seed, sample_index, position)
        noise = self._kept.get(key)
        if noise is None:
            noise = gumbel(seed, sample_index, position, self.vocab_size).to(self.device)
            self._kept[key] = noise
            if len(self._kept) > self._capacity:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        return noise


def gumbel(seed: int, sample_index: int, position: int, size: int) -> Tensor:
    """Standard Gumbel variates `-log(-log(u))`, float32 `[size]`.

    With v = 1 - u on a grid of 2^-32 offset by half a step, -log(u) is -log1p(-v): the large variates, which
    decide an argmax, come from small v, where float32 is at its finest; none is infinite.
    """
    generator = np.random.Philox(counter=[0, 0, 0, position], key=[seed, sample_index])
    words = generator.random_raw((size + 1) // 2).view(np.uint32)[:size]
    v = torch.from_numpy(words.astype(np.float32)).add_(0.5).mul_(2.0**-32)
    # The largest words round up to v = 1 in float32.
    v.clamp_(max=1 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()
