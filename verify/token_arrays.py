"""Token lists of a request's parameters as arrays, made once: a step copies them to the device and loops over none.

Bad words are token sequences that an output may not hold, forbidden in all rows of a request at once.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.kernels.types.upload import upload

Ids = NDArray[np.int64]


class _WordGroup(NamedTuple):
    """Words of one length, at least two tokens.

    Attributes:
        prefixes: `[words, length - 1]`, all tokens but the last.
        lasts: `[columns]`, the different last tokens.
        columns: `[words]`, the place of each word's last token in `lasts`.
    """

    prefixes: Ids
    lasts: Ids
    columns: Ids


class BadWords:
    """Bad words packed by their length, so that a step compares all words of a length together.

    Args:
        words: token sequences, none empty.

    Attributes:
        reach: number of tokens before the next one that decide what is forbidden.
    """

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        by_length: dict[int, set[tuple[int, ...]]] = {}
        for word in words:
            by_length.setdefault(len(word), set()).add(tuple(word))
        self.reach = max(by_length, default=1) - 1
        self._single: Ids = np.array([token for (token,) in by_length.pop(1, ())], np.int64)
        self._groups = [_group(sorted(same)) for same in by_length.values()]

    def forbid(self, scores: Tensor, latest: Sequence[int], paths: Tensor) -> None:
        """Forbid the last token of each word whose other tokens end the output and path; in place, without a sync.

        Args:
            scores: `[rows, vocab]` of one request.
            latest: the last tokens of its output, at most `reach`.
            paths: see `NodeRows`.
        """
        device = scores.device
        if len(self._single):
            # Not by an assignment, which would copy the number to a device and wait for it.
            scores.index_fill_(1, upload(self._single, device), float("-inf"))
        if not self._groups:
            return
        before = upload([-1] * (self.reach - len(latest)) + list(latest), device)
        history = torch.cat([before.expand(len(paths), -1), paths], 1)
        ends = self.reach + (paths >= 0).sum(1, keepdim=True)
        window = history.gather(1, ends + torch.arange(-self.reach, 0, device=device))
        for group in self._groups:
            count, length = group.prefixes.shape
            flat = np.concatenate([group.prefixes.ravel(), group.columns, group.lasts])
            ids, size = upload(flat, device), count * length
            prefixes, columns, lasts = ids[:size], ids[size : size + count], ids[size + count :]
            found = (window[:, None, -length:] == prefixes.view(count, length)).all(2)
            # Several words may have the same last token.
            hits = torch.zeros(len(paths), len(group.lasts), dtype=torch.int32, device=device)
            hits.index_add_(1, columns, found.to(torch.int32))
            scores[:, lasts] = scores[:, lasts].masked_fill(hits > 0, float("-inf"))


def _group(words: Sequence[tuple[int, ...]]) -> _WordGroup:
    tokens = np.array(words, np.int64)
    lasts, columns = np.unique(tokens[:, -1], return_inverse=True)
    return _WordGroup(tokens[:, :-1], lasts, columns.reshape(-1))


class TokenArrays:
    """Arrays of the parameters of a `Sampling`.

    Attributes:
        allowed: int64, `allowed_token_ids`; empty without them.
        biased, addends: int64 and float64, the tokens of `logit_bias` and what is added to their logits.
        bad_words: the packed words.
    """

    def __init__(
        self,
        allowed_token_ids: Sequence[int] | None,
        logit_bias: Sequence[tuple[int, float]],
        bad_words: Sequence[Sequence[int]],
    ) -> None:
        self.allowed = np.array(allowed_token_ids or (), np.int64)
        self.biased = np.array([token for token, _ in logit_bias], np.int64)
        self.addends = np.array([addend for _, addend in logit_bias], np.float64)
        self.bad_words = BadWords(bad_words)
