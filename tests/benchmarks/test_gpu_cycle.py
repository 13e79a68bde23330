"""The engines of the cycle's benchmark accept as many drafts as asked, on interpreted kernels where there is no GPU."""

import itertools
import random

import pytest
import torch

from benchmarks.gpu.cycle_engines import Engines, request_of
from benchmarks.gpu.cycle_sizes import HEADS, TINY

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")]


@pytest.mark.long
@pytest.mark.parametrize("head", HEADS)
def test_as_many_drafts_are_accepted_as_asked(head: str) -> None:
    engines = Engines(TINY, DEVICE)
    engines.use(head)
    engine, forced = engines.eagle["graphs"], engines.forced["graphs"]
    assert engine.kernels.name == "triton"
    for accepted in TINY.accepted:
        forced.accepted = accepted
        request = request_of(random.Random(0), 0, TINY)
        engine.scheduler.add(request)
        lengths = []
        for _ in range(4):
            engine.step()
            lengths.append(request.num_output)
        engine.scheduler.abort(request)
        # The first step yields one token, the head reads the prompt, and then it drafts.
        assert [after - before for before, after in itertools.pairwise(lengths)] == [1 + accepted] * 3


def test_requests_are_gone_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they would be part of the next batch, whose figures were wrong."""
    engines = Engines(TINY, DEVICE)
    engine = engines.plain["eager"]

    def refuse() -> None:
        raise torch.OutOfMemoryError("too large")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", refuse)
        with pytest.raises(torch.OutOfMemoryError):
            engines.steps(engine, 2)
    assert not engine.has_unfinished
