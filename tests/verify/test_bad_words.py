"""Bad words, many at a time: the same as word by word, without a torch operation for each."""

import math
from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.verify.sampling import Context, Sampling
from specdec.verify.token_arrays import BadWords
from specdec.verify.transforms import NodeRows, processed_logits
from tests.kernel_sets import TORCH

VOCAB = 5
tokens = st.integers(0, VOCAB - 1)
WORDS = st.lists(st.lists(tokens, min_size=1, max_size=4).map(tuple), min_size=1, max_size=40)
PATHS = st.lists(st.lists(tokens, max_size=3), min_size=1, max_size=4)


def forbidden_one_by_one(words: Sequence[Sequence[int]], output: Sequence[int]) -> set[int]:
    """Tokens that complete a word behind an output."""
    return {word[-1] for word in words if [*output][max(0, len(output) - len(word) + 1) :] == list(word[:-1])}


@given(words=WORDS, output=st.lists(tokens, max_size=5), paths=PATHS)
def test_all_words_at_once_forbid_what_each_alone_forbids(
    words: list[tuple[int, ...]], output: list[int], paths: list[list[int]]
) -> None:
    packed, scores = BadWords(words), torch.zeros(len(paths), VOCAB)
    depth = max(map(len, paths))
    padded = torch.tensor([[*path, *[-1] * (depth - len(path))] for path in paths]).reshape(len(paths), depth)
    packed.forbid(scores, output[max(0, len(output) - packed.reach) :], padded)
    for row, path in zip(scores.tolist(), paths, strict=True):
        found = {token for token, score in enumerate(row) if score == -math.inf}
        assert found == forbidden_one_by_one(words, [*output, *path])


class OperationCount(TorchDispatchMode):
    """Counts the operations of torch that run within it."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(words: Sequence[tuple[int, ...]]) -> int:
    """Operations of a step of one request with these words."""
    context = Context(Sampling(bad_words=tuple(words)), [1, 2, 3], 1)
    logits, paths = torch.zeros(2, 600), torch.tensor([[3], [-1]])
    with OperationCount() as mode:
        processed_logits(logits, [NodeRows(context, 2, lambda: paths)], TORCH)
    return mode.count


def test_more_words_are_no_more_operations() -> None:
    few = [(1,), (2, 3), (4, 5, 6)]
    many = [(n,) for n in range(500)] + [(n, n + 1) for n in range(500)] + [(n, n, n + 1) for n in range(500)]
    assert operations(many) == operations(few)
