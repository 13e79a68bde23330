"""Draft heads by their definitions: whole sequences, plain functions over tensors, no cache and none of our modules."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from tests.checkpoints import HEADS, KV_HEADS, VOCAB, Head
from tests.roundings import to_float32


class DenseHead:
    """A head in float64."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.weights = {name: tensor.double() for name, tensor in head.weights.items()}

    def features(self, final: Tensor, hidden_states: Sequence[Tensor]) -> Tensor:
        """`[tokens, size]`, what the head reads of a target.

        Args:
            final: `[tokens, hidden]` behind the target's last norm.
            hidden_states: of each depth, as transformers numbers them.
        """
        if not self.head.eagle3:
            return final
        states = [hidden_states[tap] for tap in self.head.taps]
        if "tap0" in self.weights:
            states = [self._norm(state, f"tap{i}") for i, state in enumerate(states)]
        row = torch.cat(states, -1)
        if "wide" in self.weights:
            row = self._norm(row, "wide")
        return self._linear(row, "fc")

    def states(self, tokens: Sequence[int], features: Tensor) -> Tensor:
        """`[tokens, hidden]` after x_1 .. x_n, with features of x_0 .. x_(n-1), at rotary positions 0 .. n - 1."""
        embedded = self.weights["embed"][list(tokens)]
        if self.head.eagle3:
            normed = self._norm(features, "0.hidden")
            row = torch.cat([self._norm(embedded, "0.in"), normed], -1)
            hidden = self._layer(0, row, normed if self.head.norm_before_residual else features)
            for layer in range(1, self.head.layers):
                hidden = self._layer(layer, self._norm(hidden, f"{layer}.in"), hidden)
            return self._norm(hidden, "last") if self.head.norm_output else hidden
        row = self._linear(torch.cat([embedded, features], -1), "fc")
        return self._layer(0, row, row)

    def logits(self, states: Tensor) -> Tensor:
        """`[rows, vocab]`, -inf where nothing is proposed."""
        if self.head.eagle3 and not self.head.norm_output:
            states = self._norm(states, "last")
        scores = states @ self.weights["out"].T
        full = torch.full((len(states), VOCAB), float("-inf"), dtype=torch.float64)
        full[:, list(range(VOCAB)) if self.head.tokens is None else self.head.tokens] = scores
        return full

    def tree_logits(self, tokens: Sequence[int], features: Tensor, paths: Sequence[tuple[int, ...]]) -> Tensor:
        """`[paths, vocab]` after `tokens` x_1 .. x_n and each path behind them; the head reads its own states there."""

        @cache
        def state(path: tuple[int, ...]) -> Tensor:
            own = [state(path[:depth])[None] for depth in range(len(path))]
            return self.states([*tokens, *path], torch.cat([features, *own]))[-1]

        return self.logits(torch.stack([state(path) for path in paths]))

    def _layer(self, layer: int, row: Tensor, residual: Tensor) -> Tensor:
        query, key, value = (
            self._linear(row, f"{layer}.{name}").unflatten(-1, (-1, self.head.head_dim)) for name in "qkv"
        )
        if f"{layer}.qn" in self.weights:
            query, key = self._norm(query, f"{layer}.qn"), self._norm(key, f"{layer}.kn")
        query, key = self._rotated(query), self._rotated(key)
        key, value = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (key, value))
        scores = torch.einsum("ihd,jhd->hij", query, key) / self.head.head_dim**0.5
        hidden = torch.ones(len(row), len(row), dtype=torch.bool)
        hidden = hidden.triu(1) | hidden.tril(-(self.head.window or len(row)))
        mixed = torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value)
        hidden = residual + self._linear(mixed.flatten(1), f"{layer}.o")
        x = self._norm(hidden, f"{layer}.post")
        gate = self._linear(x, f"{layer}.gate")
        return hidden + self._linear(gate * torch.sigmoid(gate) * self._linear(x, f"{layer}.up"), f"{layer}.down")

    def _rotated(self, x: Tensor) -> Tensor:
        """Each pair (i, i + dim / 2) turned by the position times its frequency; angles are float32, as everywhere."""
        half = self.head.head_dim // 2
        exponents = torch.arange(0, self.head.head_dim, 2).float() / self.head.head_dim
        frequencies = 1.0 / self.head.theta**exponents / self.head.rope_factor
        angles = torch.arange(len(x)).float()[:, None] * frequencies
        cos, sin = angles.cos().double()[:, None], angles.sin().double()[:, None]
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        bias = self.weights.get(f"{name}_bias")
        product = x @ self.weights[name].T
        return product if bias is None else product + bias

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """Root mean square, which is float32 in transformers whatever the rest is."""
        single = to_float32(x)
        single = single * torch.rsqrt(single.square().mean(-1, keepdim=True) + self.head.eps)
        return single.double() * self.weights[name]
