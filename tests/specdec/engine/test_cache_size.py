"""Memory of the cache: as asked, or what a GPU has left."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import LLM, DraftShape
from specdec.building.llm_settings import sharing_a_gpu
from specdec.building.rehearsal import CPU_CACHE_BYTES, Rehearsal, cache_bytes, small_cache
from specdec.cache.kv_cache import entry_bytes
from specdec.config import EngineConfig
from specdec.scheduling.scheduler_config import SchedulerConfig
from specdec.scheduling.step_plan import StepPlan
from tests.specdec.world import World

pytestmark = pytest.mark.slow

GIB = 1 << 30
GPU = "cuda"


def never() -> int:
    raise AssertionError("there is nothing to measure")


class FakeGPU:
    """80 GiB, of which something outside of torch takes 1; weights and the largest step take 20, its cache 2 more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.peak = 16 * GIB
        answers = {
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": self.reset,
            "max_memory_reserved": lambda _: self.peak,
            "memory_reserved": lambda _: self.allocated,
            "mem_get_info": lambda _: (80 * GIB - GIB - self.allocated, 80 * GIB),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)

    def reset(self, _: torch.device) -> None:
        self.peak = self.allocated

    def rehearse(self) -> int:
        self.peak = max(self.peak, self.allocated + 4 * GIB + 2 * GIB)
        return 2 * GIB


def test_a_given_size_is_taken() -> None:
    for device in ("cpu", GPU):
        assert cache_bytes(EngineConfig(kv_cache_memory=5, device=device), never) == 5


def test_a_cpu_has_a_default() -> None:
    assert cache_bytes(EngineConfig(), never) == CPU_CACHE_BYTES


@pytest.mark.long
def test_a_gpu_gives_what_weights_and_the_largest_step_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGPU(monkeypatch)
    gpu.peak = 70 * GIB
    config = EngineConfig(device=GPU, gpu_memory_utilization=0.75)
    assert cache_bytes(config, gpu.rehearse) == (60 - 20 - 1) * GIB


@pytest.mark.long
def test_two_engines_of_one_process_have_room_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the second finds in use includes the first one's weights and cache."""
    gpu = FakeGPU(monkeypatch)
    caches = []
    for number in (1, 2):
        config = EngineConfig(device=GPU, **sharing_a_gpu({}, number, 2))
        caches.append(cache_bytes(config, gpu.rehearse))
        gpu.allocated += caches[-1] + 16 * GIB
    assert caches == pytest.approx([(36 - 20 - 1) * GIB, (72 - 15 - 16 - 20 - 1) * GIB], abs=1)


@pytest.mark.long
def test_a_gpu_without_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGPU(monkeypatch)
    config = EngineConfig(device=GPU, gpu_memory_utilization=0.25)
    with pytest.raises(ValueError, match=r"gpu_memory_utilization 0.25 of 81920 MiB leaves no room .* 21504 MiB"):
        cache_bytes(config, gpu.rehearse)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "the cache's default of 10 bytes is less than one block of 4096 bytes; set kv_cache_memory"),
        (
            {"device": GPU, "gpu_memory_utilization": 0.5},
            "gpu_memory_utilization 0.5 leaves the cache 10 bytes, which is less than one block of 4096 bytes; raise "
            "it or lower max_num_batched_tokens",
        ),
        (
            {"device": GPU, "kv_cache_memory": 10},
            "kv_cache_memory 10 is less than one block of 4096 bytes; raise it",
        ),
    ],
)
def test_what_gave_too_little_for_one_block_is_named(settings: dict[str, Any], message: str) -> None:
    assert str(small_cache(EngineConfig(**settings), 10, 4096)) == message


def test_a_cache_by_default_that_holds_no_block_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.building.rehearsal.CPU_CACHE_BYTES", 10)
    with pytest.raises(ValueError, match="the cache's default of 10 bytes is less than one block"):
        LLM(world.folder / "target", None)


@pytest.mark.parametrize(("seats", "budget", "context"), [(3, 64, None), (5, 5, None), (1, 200, 20)])
def test_the_rehearsal_fills_a_step_with_tokens_and_one_with_drafts(
    world: World, seats: int, budget: int, context: int | None
) -> None:
    shape = DraftShape(3, 3, 8)
    limits = SchedulerConfig(max_num_seqs=seats, max_num_batched_tokens=budget)
    llm = LLM(
        world.folder / "target",
        world.folder / "head",
        dtype="float64",
        shape=shape,
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        adaptive_drafts=False,
        prefill_stretch=0,
        max_model_len=context,
    )
    rehearsal = Rehearsal(replace(llm.config, scheduler=limits), llm.max_model_len, shape.slots)
    seen = []
    schedule = llm.engine.scheduler.schedule

    def watched(clock: float) -> StepPlan:
        plan = schedule(clock)
        seen.append((sum(row.num_known for row in plan.rows), sum(row.num_nodes for row in plan.rows)))
        return plan

    llm.engine.scheduler.schedule = watched  # type: ignore[method-assign]
    rehearsal.run(llm.engine)
    length = min(budget // seats, (context or 256) - 3)
    assert seen == [(length * seats, 0), (seats, min(shape.nodes * seats, budget - seats))]
    assert not llm.engine.has_unfinished
    assert llm.engine.scheduler.stats().kv_usage == 0


@pytest.mark.long
def test_blocks_are_as_many_as_the_memory_holds_and_seats_can_use(world: World) -> None:
    def blocks(memory: int | None, head: Path | None, **settings: int) -> int:
        llm = LLM(world.folder / "target", head, dtype="float64", kv_cache_memory=memory, block_size=8, **settings)
        return llm.engine.worker.cache.num_blocks

    target = LLM(world.folder / "target", draft=None, dtype="float64").model.config
    plain = 8 * entry_bytes(target, None, torch.float64)
    # Two layers, two heads of keys and of values, eight numbers each.
    assert plain == 8 * 2 * 2 * 2 * 8 * 8
    assert blocks(10 * plain + 3, None) == 10
    # The head has a layer of its own, and a feature of 32 numbers.
    assert blocks(10 * (plain * 3 // 2 + 8 * 32 * 8), world.folder / "head") == 10
    assert blocks(None, None, max_num_seqs=3, max_model_len=40) == 3 * 5
