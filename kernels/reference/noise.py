"""Gumbel noise as a pure function of request and output position, in any order of calls."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.types.types import NoiseKey, NoiseMaker, Stream


class GumbelNoise:
    """Standard Gumbel noise G(seed, sample index, position, .) over the vocabulary, float32.

    Counter-based (Philox 4x64, Salmon et al. 2011): the key is (seed, sample index), position and stream are
    the counter's highest words. The draw is thus a function of its arguments alone, which is what makes sampled
    speculation invisible (Gumbel-max coupling, Daliri et al. 2024).

    Recent vectors are kept, since drafting and verification use the same ones.

    Args:
        cache_bytes: memory for kept vectors, allocated at the first call.
        make: writes the noise of keys, `gumbel` but for rounding; None for `gumbel` itself.
    """

    def __init__(self, device: torch.device, cache_bytes: int = 64 << 20, make: NoiseMaker | None = None) -> None:
        self.device, self.cache_bytes, self.make = device, cache_bytes, make
        self._vectors = torch.empty(0, 0)
        self._free: list[int] = []
        self._kept: OrderedDict[tuple[NoiseKey, Stream, int], int] = OrderedDict()

    def num_kept(self, size: int) -> int:
        """Return how many vectors of a size are kept; each is valid until as many others have been asked for."""
        return max(64, self.cache_bytes // (4 * max(size, self._vectors.shape[1])))

    def at(self, key: NoiseKey, size: int, stream: Stream = Stream.TARGET, lane: int = 0) -> Tensor:
        """Return the noise of an output position, float32 `[size]`; see `num_kept`.

        Args:
            stream, lane: as in `gumbel`.
        """
        (place,) = self._places([key], size, stream, lane)
        vector = self._vectors[place]
        return vector if len(vector) == size else vector[:size]

    def addresses(self, keys: Sequence[NoiseKey | None], size: int) -> list[int]:
        """Return where the noise of each key lies, 0 for None; of at most `num_kept` keys."""
        places = iter(self._places([key for key in keys if key is not None], size, Stream.TARGET, 0))
        start, stride = self._vectors.data_ptr(), 4 * self._vectors.shape[1]
        return [0 if key is None else start + next(places) * stride for key in keys]

    def _places(self, keys: Sequence[NoiseKey], size: int, stream: Stream, lane: int) -> list[int]:
        """Return which vector holds the noise of each key, made now where none does."""
        if size > self._vectors.shape[1]:
            # One allocation for all: many small ones would fragment memory.
            with torch.inference_mode(False):
                self._vectors = torch.empty(self.num_kept(size), size, device=self.device)
            self._free = list(range(len(self._vectors)))
            self._kept.clear()
        places, new = list[int](), dict[NoiseKey, int]()
        for key in keys:
            named = (key, stream, lane)
            place = self._kept.get(named)
            if place is None:
                place = self._free.pop() if self._free else self._kept.popitem(last=False)[1]
                self._kept[named] = new[key] = place
            else:
                self._kept.move_to_end(named)
            places.append(place)
        if new:
            self._make(new, stream, lane)
        return places

    def _make(self, places: dict[NoiseKey, int], stream: Stream, lane: int) -> None:
        size = self._vectors.shape[1]
        if self.make is None:
            for key, place in places.items():
                self._vectors[place] = gumbel(*key, size, stream, lane)
        else:
            start = self._vectors.data_ptr()
            self.make(list(places), size, stream, lane, [start + place * 4 * size for place in places.values()])


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
