"""What holds while a step runs, and no longer."""

from typing import NoReturn

import pytest
import torch

from specdec.core.device import StepScope
from specdec.kernels.types.threads import LimitedThreads


class Refusing:
    """A context that cannot be entered."""

    def __enter__(self) -> NoReturn:
        raise RuntimeError("not now")

    def __exit__(self, *_: object) -> None:
        raise AssertionError("it was not entered")


def test_it_can_be_entered_again_and_leaves_nothing() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        scope = StepScope(torch.device("cpu"), LimitedThreads(2))
        for _ in range(2):
            with scope:
                assert torch.is_inference_mode_enabled()
                assert torch.get_num_threads() == 2
            assert not torch.is_inference_mode_enabled()
            assert torch.get_num_threads() == 3
        with pytest.raises(ValueError, match="in a step"), scope:
            raise ValueError("in a step")
        assert not torch.is_inference_mode_enabled()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("most", "expected"), [(None, 2), (4, 2), (1, 1)])
def test_threads_are_never_more_than_before(most: int | None, expected: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with LimitedThreads(most):
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_what_cannot_be_entered_leaves_no_inference_mode() -> None:
    scope = StepScope(torch.device("cpu"), Refusing())
    with pytest.raises(RuntimeError, match="not now"):
        scope.__enter__()
    assert not torch.is_inference_mode_enabled()
