"""The benchmark of the kernels runs: every kernel and peer is there, held against its twin, and timed."""

import math
import random
import time
from typing import Any

import pytest
import torch

from benchmarks.gpu.batch import random_batch, random_tree
from benchmarks.gpu.clock import clock_of
from benchmarks.gpu.kernels import measure, subjects, table_of
from benchmarks.gpu.race import EXACT, Case, Peer, Race, Subject, worst_error
from benchmarks.gpu.sizes import TINY
from specdec import DraftShape

# Of a part of which a row sees nothing, the interpreter says so.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PEERS = {
    "copy": set(),
    "one_number": set(),
    "rms_norm": {"torch"},
    "add_rms_norm": {"torch"},
    "rotary_store": {"torch"},
    "silu_and_mul": {"torch"},
    "move_kv": {"torch"},
    "copy_blocks": {"torch"},
    "gumbel_argmax": {"torch"},
    "perturbed_top_k": {"torch"},
    "filter_logits": {"torch's sort"},
    "swap": {"torch"},
    "next_frontier": {"torch"},
    "best_nodes": {"torch"},
    "coupled_walk": {"host"},
    "rejection_walk": {"host"},
    "commit": {"torch"},
    "tree_attention": {"sdpa", "cudnn", "flex", "gather", "twin"},
}


def is_positive(number: float) -> bool:
    return math.isfinite(number) and number > 0


def test_every_kernel_has_its_peers() -> None:
    """They are run by `bash benchmarks/gpu_day.sh kernels --rehearse`, which fails where one cannot."""
    built = [(subject, subject.build()) for subject in subjects(TINY, DEVICE)]
    assert {subject.kernel for subject, _ in built} == set(PEERS)
    assert {subject.shape["rows"] for subject, _ in built if subject.kernel == "tree_attention"} == {
        "tree",
        "decode",
        "chunk",
    }
    for subject, case in built:
        assert set(case.peers) == PEERS[subject.kernel]
        assert case.bound <= 2e-5
        other = subject.kernel in ("perturbed_top_k", "filter_logits") or subject.shape.get("way") == "sampled"
        for name, peer in case.peers.items():
            assert (peer.result is not None) == (name != "gather" and not other)


def test_cases_left_out_for_time_are_listed() -> None:
    figures = measure(TINY, DEVICE, time.monotonic(), print)
    assert figures["rows"] == figures["failed"] == []
    assert {cut["kernel"] for cut in figures["cut"]} == set(PEERS)


def test_the_table_has_a_line_per_kernel() -> None:
    row = {"kernel": "a", "copy_share": 0.5, "error": 0.0}
    rows = [
        row | {"us": 3.0, "shape": {"rows": 1}, "peers": {"torch": {"us": 6.0, "ratio": 2.0}}},
        row | {"us": 9.0, "shape": {"rows": 8}, "peers": {"torch": {"missing": "why"}, "gather": {"ratio": 0.1}}},
        row | {"us": 1.0, "shape": {"rows": 2}, "peers": {}, "kernel": "b", "copy_share": None},
    ]
    columns = [[*column.cells] for column in table_of(rows).columns]
    assert columns[0] == ["a", "b"]
    assert columns[2] == ["rows=8", "rows=2"]
    assert columns[4] == ["50%", ""]
    assert columns[6] == ["2.00: torch at rows=1", ""]


def raced(case: Case) -> dict[str, Any]:
    race = Race(clock_of(DEVICE), rounds=3, iterations=2, deadline=time.monotonic() + 60)
    return race.measure(Subject("none", {}, lambda: case))


def test_a_wrong_result_is_no_row() -> None:
    x = torch.ones(3, 4, device=DEVICE)
    row = raced(Case(lambda: x, lambda: x.clone(), 48, EXACT, {}))
    assert row["error"] == 0
    assert row["rounds"] == 3
    with pytest.raises(ValueError, match="an error of 1, where 0 is allowed"):
        raced(Case(lambda: 2 * x, lambda: x, 48, EXACT, {}))
    with pytest.raises(ValueError, match="nan"):
        raced(Case(lambda: x * float("nan"), lambda: x, 48, 1.0, {}))
    # In a tensor that is changed in place, and which the twin is to find as it was.
    with pytest.raises(ValueError, match="an error of 1,"):
        raced(Case(lambda: x.add_(x), lambda: x, 48, EXACT, {}, (x,)))


def test_changed_tensors_are_the_same_to_all() -> None:
    x = torch.zeros(3, 4, device=DEVICE)
    row = raced(Case(lambda: x.add_(1), lambda: x.add_(1), 48, EXACT, {"peer": Peer(lambda: x.add_(1))}, (x,)))
    assert row["peers"]["peer"]["error"] == 0


def test_a_peer_that_cannot_run_says_why() -> None:
    def refuse() -> None:
        raise RuntimeError("not on this machine\nat all")

    x = torch.ones(1, device=DEVICE)
    row = raced(Case(lambda: x, lambda: x, 4, EXACT, {"none": Peer(refuse), "other": Peer(lambda: x)}))
    assert row["peers"]["none"] == {"missing": "RuntimeError: not on this machine"}
    assert is_positive(row["peers"]["other"]["us"])


def test_one_vector_of_many_is_seen_and_one_integer() -> None:
    x = torch.randn(100, 50, 8)
    wrong = x.clone()
    wrong[70, 20, 3] += x[70, 20].norm()
    assert worst_error([wrong], [x]) == pytest.approx(1)
    numbers = torch.arange(10)
    assert worst_error([x, numbers], [x, numbers.clamp(max=8)]) == pytest.approx(0.1)


@pytest.mark.parametrize("seed", range(5))
def test_random_trees_are_full_and_of_many_depths(seed: int) -> None:
    trees = [random_tree(DraftShape(6, 10, 60), random.Random(seed + i)) for i in range(3)]
    for tree in trees:
        assert len(tree) == 60
        assert set(tree.depths) == {1, 2, 3, 4, 5, 6}
    batch = random_batch(40, 2, trees, 16, 30, DEVICE, seed)
    assert list(batch.rows.query_lens) == [62] * 3
    assert list(batch.rows.lengths) == [102] * 3
    assert len(set(batch.rows.block_tables.flatten().tolist())) == 21
    assert len(set(batch.slots.tolist())) == 3 * 62
