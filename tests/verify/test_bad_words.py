"""Bad words, many at a time: the same as word by word, without a torch operation for each."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.verify.sampling import Context, Sampling
from specdec.verify.token_arrays import BadWords
from specdec.verify.transforms import NodeRows, processed_logits
from tests.kernel_sets import TORCH
from tests.simulated_gpu import GPU, simulated_gpu

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


def test_edits_of_logits_let_no_host_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    edits = {"allowed_token_ids": (0, 1, 2, 3), "logit_bias": ((2, 3.0),), "min_tokens": 4, "end_tokens": (0,)}
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.5}
    sampling = Sampling(temperature=0.7, bad_words=((1,), (2, 3)), **edits, **penalties)  # type: ignore[arg-type]
    logits, paths = torch.rand(2, VOCAB), torch.tensor([[2], [-1]])
    rows = NodeRows(Context(sampling, [1, 2, 3], 1), 2, lambda: paths)
    expected = processed_logits(logits.clone(), [rows], TORCH)
    with simulated_gpu(monkeypatch) as gpu:
        logits, paths = logits.to(GPU), paths.to(GPU)
        gpu.waits.clear()
        found = processed_logits(logits, [rows], TORCH)
        assert gpu.waits == []
        assert torch.equal(found.cpu(), expected)
