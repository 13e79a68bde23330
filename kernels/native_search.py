"""Search of draft trees by the compiled library: all levels of a head in one call."""

from itertools import accumulate

import torch
from torch import Tensor

from specdec.kernels.fused import FoundLevels, HeadWeights, SearchInputs
from specdec.kernels.native_library import HeadFields, Library, MatrixFields, SearchFields
from specdec.kernels.native_operations import NativeLayer, NativeProjection
from specdec.kernels.projection import Product
from specdec.kernels.types import NoiseSource, Stream

WITHOUT_FEATURES, WITH_INPUT_PRODUCT, WITH_NORMS = range(3)
LARGEST_WIDTH = 64
# A noise source keeps as many vectors.
MOST_NOISE = 64


class NativeSearch:
    """The search with one head and output matrix.

    Args:
        noise: of sampled rows.
        output: from states to scores.
        tokens: int64 `[size]`, the tokens scored; None for all in order.
    """

    def __init__(
        self,
        library: Library,
        noise: NoiseSource,
        head: HeadWeights,
        output: Product,
        vocab_size: int,
        tokens: Tensor | None,
    ) -> None:
        self.library, self.noise, self.vocab_size = library, noise, vocab_size
        layers = [layer for layer in head.layers if isinstance(layer, NativeLayer)]
        assert len(layers) == len(head.layers)
        kind = WITHOUT_FEATURES
        if head.input is not None:
            kind = WITH_INPUT_PRODUCT
        elif head.state_norm is not None:
            kind = WITH_NORMS
        norms = [
            None if norm is None else norm.detach().float().contiguous()
            for norm in (head.embed_norm, head.state_norm, head.norm)
        ]
        pointers = torch.tensor([layer.address for layer in layers])
        given = head.input
        assert given is None or isinstance(given, NativeProjection)
        assert isinstance(output, NativeProjection)
        embedding = head.embedding.contiguous()
        self._kept = (layers, norms, pointers, given, output, embedding, tokens)
        self.fields = HeadFields(
            kind,
            embedding.shape[1],
            len(layers),
            head.residual_is_normed,
            head.states_are_normed,
            head.eps,
            embedding.data_ptr(),
            *(None if norm is None else norm.data_ptr() for norm in norms),
            pointers.data_ptr(),
            None if tokens is None else tokens.data_ptr(),
            MatrixFields() if given is None else given.fields,
            output.fields,
        )

    def takes(self, inputs: SearchInputs) -> bool:
        """Return whether a search is not too wide for the library, and needs no more noise than is kept."""
        noisy = sum(key is not None for key in inputs.noise)
        return inputs.width <= LARGEST_WIDTH and noisy * inputs.depth <= MOST_NOISE

    def __call__(self, inputs: SearchInputs) -> FoundLevels:
        """Search; `inputs.depths` is lowered where a row ended."""
        rows, width, depth = len(inputs.base), inputs.width, inputs.depth
        sizes = [rows * width, *[rows * width * width] * (depth - 1)]
        starts = torch.tensor([0, *accumulate(sizes)])
        tokens = torch.empty(sum(sizes), dtype=torch.int64)
        values = torch.empty(sum(sizes))
        best = torch.empty(depth, rows, width, dtype=torch.int64)
        levels = torch.zeros(1, dtype=torch.int64)
        base = torch.tensor(inputs.base)
        depths = None if inputs.depths is None else torch.tensor(inputs.depths)
        temperatures = None if inputs.temperatures is None else inputs.temperatures.float().contiguous()
        states = inputs.states.contiguous()
        noise, vectors = self._noise(inputs)
        kv = inputs.kv
        self.library.search(
            self.fields,
            SearchFields(
                rows,
                width,
                depth,
                inputs.words,
                inputs.tables.shape[1],
                inputs.block_size,
                inputs.first,
                kv.stride(0) * kv.element_size(),
                inputs.least_reach,
                inputs.slots.data_ptr(),
                inputs.tables.data_ptr(),
                base.data_ptr(),
                starts.data_ptr(),
                states.data_ptr(),
                inputs.rotary.data_ptr(),
                kv.data_ptr(),
                None if temperatures is None else temperatures.data_ptr(),
                None if noise is None else noise.data_ptr(),
                None if depths is None else depths.data_ptr(),
                tokens.data_ptr(),
                best.data_ptr(),
                levels.data_ptr(),
                values.data_ptr(),
            ),
        )
        del vectors
        if inputs.depths is not None and depths is not None:
            inputs.depths[:] = depths.tolist()
        found = int(levels[0])
        return FoundLevels(
            [part.view(rows, -1) for part in tokens.split_with_sizes(sizes)[:found]],
            [part.view(rows, -1) for part in values.split_with_sizes(sizes)[:found]],
            list(best[:found].unbind(0)),
        )

    def _noise(self, inputs: SearchInputs) -> tuple[Tensor | None, list[Tensor]]:
        """Return addresses `[rows, depth]` of each level's noise, None where no row has any, and the noise itself."""
        if all(key is None for key in inputs.noise):
            return None, []
        addresses = torch.zeros(len(inputs.noise), inputs.depth, dtype=torch.int64)
        vectors = []
        for row, key in enumerate(inputs.noise):
            for level in range(inputs.depth if key is not None else 0):
                assert key is not None
                at = key._replace(position=key.position + level)
                vectors.append(self.noise.at(at, self.vocab_size, Stream.TARGET, 0))
                addresses[row, level] = vectors[-1].data_ptr()
        return addresses, vectors
