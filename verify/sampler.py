"""Argmax and top k of scores with each row's own noise, by a device's means."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.upload import upload
from specdec.verify.noise import GumbelNoise, Stream

# What is emitted where no token can be: the row's logits are not finite, or every token is forbidden.
NO_TOKEN = -1


class NoiseKey(NamedTuple):
    """Whose noise, and of which output position (0 is the first generated token)."""

    seed: int
    sample_index: int
    position: int


class NoiseColumns(NamedTuple):
    """Keys as a device takes them.

    Attributes:
        seeds, sample_indices, positions: int64 `[rows]`; 0 where a row has no noise.
        sampled: bool `[rows]`, whether it has.
    """

    seeds: Tensor
    sample_indices: Tensor
    positions: Tensor
    sampled: Tensor


class NoiseRows:
    """Whose noise each row of scores takes, None for no noise."""

    def __init__(self, keys: Sequence[NoiseKey | None], columns: NoiseColumns | None = None) -> None:
        self.keys, self._columns = keys, columns

    def columns(self, device: torch.device) -> NoiseColumns:
        """Made and sent to the device by who first asks."""
        if self._columns is None:
            numbers = [(*key, 1) if key else (0, 0, 0, 0) for key in self.keys]
            seeds, indices, positions, sampled = upload(numbers, device).view(-1, 4).T.contiguous().unbind()
            self._columns = NoiseColumns(seeds, indices, positions, sampled.bool())
        return self._columns

    def repeated(self, times: int) -> "NoiseRows":
        """Each row's so many times in turn."""
        keys = [key for key in self.keys for _ in range(times)]
        columns = self._columns
        if columns is not None:
            columns = NoiseColumns(*(column.repeat_interleave(times) for column in columns))
        return NoiseRows(keys, columns)

    def later(self, positions: int) -> "NoiseRows":
        """The noise of so many output positions on."""
        keys = [key and key._replace(position=key.position + positions) for key in self.keys]
        columns = self._columns
        if columns is not None:
            columns = columns._replace(positions=columns.positions + positions)
        return NoiseRows(keys, columns)


class Children(NamedTuple):
    """The likeliest next tokens of each row, best first.

    Attributes:
        tokens: int64 `[rows, k]`.
        log_chances: `[rows, k]`: that each is the argmax of the perturbed scores; NaN or -inf where nothing can come.
    """

    tokens: Tensor
    log_chances: Tensor


class Candidates(NamedTuple):
    """Scores of next tokens: logits, or what became of them.

    Attributes:
        scores: `[rows, n]`.
        vocab_size: of all tokens.
        tokens: int64 `[n]` or `[rows, n]`, which tokens are scored, distinct; None for all of them in order. The
            others cannot come, so chances are normalised over these.
    """

    scores: Tensor
    vocab_size: int
    tokens: Tensor | None = None

    def full(self) -> Tensor:
        """`[rows, vocab_size]`."""
        if self.tokens is None:
            return self.scores
        scores = self.scores.new_full((len(self.scores), self.vocab_size), float("-inf"))
        return scores.scatter_(1, self.tokens.expand(self.scores.shape), self.scores)


class Sampler(Protocol):
    """Gumbel-max sampling: the argmax of scores plus noise is a draw from their softmax."""

    def argmax(self, scores: Tensor, noise: NoiseRows) -> Tensor:
        """int64 `[rows]`: lowest id on ties, `NO_TOKEN` where the largest is no finite number.

        Args:
            scores: `[rows, vocab]`, processed logits; not to be used afterwards where a row has a key.
            noise: of each row.
        """
        ...

    def top_k(
        self, candidates: Candidates, noise: NoiseRows, k: int, stream: Stream = Stream.TARGET, lane: int = 0
    ) -> Children:
        """The `k` largest of each row; scores are not to be used afterwards.

        Args:
            stream: what the noise is for.
            lane: tells independent noise of one position and stream apart.
        """
        ...


def argmax(scores: Tensor) -> Tensor:
    """int64 `[rows]`, the lowest id on ties, `NO_TOKEN` where the largest is no finite number.

    Below float32, torch's own argmax takes several times as long as its max.
    """
    values, tokens = scores.max(-1)
    return tokens.masked_fill_(~values.isfinite(), NO_TOKEN)


class TorchSampler:
    """In plain torch, with noise that is kept for whoever asks for the same position next."""

    def __init__(self, noise: GumbelNoise) -> None:
        self.noise = noise

    def argmax(self, scores: Tensor, noise: NoiseRows) -> Tensor:
        return argmax(self._perturb_(scores, noise))

    def top_k(
        self, candidates: Candidates, noise: NoiseRows, k: int, stream: Stream = Stream.TARGET, lane: int = 0
    ) -> Children:
        scores, tokens = candidates.scores, candidates.tokens
        values, best = self._perturb_(scores, noise, tokens, stream, lane).topk(k)
        log_chances = values - scores.logsumexp(-1, keepdim=True)
        if tokens is None:
            return Children(best, log_chances)
        return Children(tokens.expand(scores.shape).gather(1, best), log_chances)

    def _perturb_(
        self,
        scores: Tensor,
        noise: NoiseRows,
        tokens: Tensor | None = None,
        stream: Stream = Stream.TARGET,
        lane: int = 0,
    ) -> Tensor:
        for row, key in enumerate(noise.keys):
            if key is not None:
                own = self.noise.at(*key, stream, lane)
                scores[row] += own if tokens is None else own[tokens if tokens.ndim == 1 else tokens[row]]
        return scores


class KernelSampler:
    """By kernels that make the same noise where they need it."""

    def __init__(self, kernels: KernelSet) -> None:
        self.kernels = kernels

    def argmax(self, scores: Tensor, noise: NoiseRows) -> Tensor:
        return self.kernels.gumbel_argmax(scores, *noise.columns(scores.device))

    def top_k(
        self, candidates: Candidates, noise: NoiseRows, k: int, stream: Stream = Stream.TARGET, lane: int = 0
    ) -> Children:
        scores, columns = candidates.scores, noise.columns(candidates.scores.device)
        found = self.kernels.perturbed_top_k(scores, *columns, k, candidates.tokens, int(stream), lane)
        return Children(found.tokens, found.scores - found.log_sum_exp[:, None])
