"""The benchmark of the engine's step runs, on interpreted kernels where there is no GPU."""

import itertools
import random

import pytest
import torch

from benchmarks.gpu_cycle import HEADS, TINY, Engines, _request
from tests.benchmarks.tiny_run import TinyRun

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")


def test_every_batch_is_measured(tiny_run: TinyRun) -> None:
    figures = tiny_run.document["cycle"]
    assert tiny_run.document["tests"] is None
    assert [(row["head"], row["batch"]) for row in figures["rows"]] == list(itertools.product(HEADS, TINY.batches))
    for row in figures["rows"]:
        assert all(row[name] > 0 for name in ("plain_ms", "verification_over_plain"))
        assert [one["accepted"] for one in row["cycles"]] == list(TINY.accepted)
        assert all(one["c"] > 0 for one in row["cycles"])


@pytest.mark.parametrize("head", HEADS)
def test_as_many_drafts_are_accepted_as_asked(head: str) -> None:
    engines = Engines(TINY, DEVICE)
    engines.use(head)
    assert engines.eagle.kernels.name == "triton"
    for accepted in TINY.accepted:
        engines.forced.accepted = accepted
        request = _request(random.Random(0), 0, TINY)
        engines.eagle.add_request(request)
        lengths = []
        for _ in range(4):
            engines.eagle.step()
            lengths.append(request.num_output)
        engines.eagle.abort(request)
        # The first step yields one token, the head reads the prompt, and then it drafts.
        assert [after - before for before, after in itertools.pairwise(lengths)] == [1 + accepted] * 3
