"""What the soak on a GPU counts and calls growth. The whole is run by its rehearsal."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import soak

pytestmark = pytest.mark.slow


def rounds(*figures: tuple[float, float]) -> list[dict[str, Any]]:
    return [{"seconds": seconds, "allocated_mib": size} for seconds, size in figures]


def test_memory_may_grow_before_it_has_settled() -> None:
    samples = rounds((1, 100), (9, 140), (10, 130), (20, 143.5), (30, 120))
    assert soak.growth(samples, "allocated_mib", 10) == 3.5
    assert soak.growth(rounds((1, 100), (9, 140), (20, 139)), "allocated_mib", 10) == 0
    # A first round that takes longer than that is what the others are compared with.
    assert soak.growth(rounds((12, 100), (20, 104)), "allocated_mib", 10) == 4
    assert soak.growth(rounds((1, 100), (9, 140)), "allocated_mib", 10) is None


def test_captures_growth_and_missing_drafts_are_failures() -> None:
    fine = {"captured_in_traffic": 0, "drafts_verified": 7, "allocated_mib_grew": 0.5, "reserved_mib_grew": 64.0}
    assert soak.failures_of(fine) == []
    bad = {"captured_in_traffic": 3, "drafts_verified": 0, "allocated_mib_grew": 9.0, "reserved_mib_grew": None}
    assert soak.failures_of(bad) == [
        "3 CUDA graphs were captured after start",
        "nothing was drafted",
        "allocated_mib grew by 9.0, where 2 is allowed after 25% of the time",
        "reserved_mib grew by None, where 64 is allowed after 25% of the time",
    ]


def test_captures_in_traffic_are_counted_and_those_of_an_update_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that capture 1, 0, 1, 0 graphs, with a new head after each, which captures 10."""
    graphs = SimpleNamespace(num_captures=35)
    counts = iter([1, 0, 1, 0])
    now = iter(range(1000))

    def one_round(*_: Any, **__: Any) -> None:
        graphs.num_captures += next(counts)

    class Engine(SimpleNamespace):
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    engine = Engine(
        engine=SimpleNamespace(worker=SimpleNamespace(graphs=graphs)),
        config=SimpleNamespace(draft="head"),
        chat_prompt=lambda _: list(range(50)),
        update_draft=lambda _: setattr(graphs, "num_captures", graphs.num_captures + 10),
        stats=lambda: SimpleNamespace(queued=8, steps=9, preemptions=0, drafts_verified=5),
    )
    monkeypatch.setattr(soak, "LLM", lambda **_: engine)
    monkeypatch.setattr(soak, "soak", one_round)
    monkeypatch.setattr(soak, "time", SimpleNamespace(monotonic=lambda: next(now)))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1 << 20)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2 << 20)
    figures = soak.run_rule("coupled", replace(soak.TINY, seconds=12), torch.device("cuda"), 100)
    assert len(figures["rounds"]) == 4
    assert figures["captured_in_traffic"] == 2
    assert figures["captured_at_start"] == 35
    assert figures["captured_at_end"] == 35 + 2 + 10 * figures["updates"]
    assert figures["updates"] == 1
    assert figures["allocated_mib_grew"] == 0
