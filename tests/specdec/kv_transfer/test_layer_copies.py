"""Blocks that leave and come layer by layer beside the pass: what they hold, when, and what happens if copies fail."""

from collections.abc import Callable
from typing import Any

import pytest

from specdec import LLM, SamplingParams
from specdec.kernels.native.library import library_file
from specdec.kv_transfer import layer_copies
from specdec.kv_transfer.offloading_connector import OffloadingConnector
from specdec.scheduling.integrity import check_pool
from tests.specdec.kv_transfer.engines import (
    DRAWN,
    GREEDY,
    HOST,
    LAYERWISE,
    OTHER,
    PROMPT,
    SIZE,
    WHOLE,
    Computed,
    engine,
    run,
)
from tests.specdec.world import World

# Little more than one request.
SMALL: dict[str, Any] = {"kv_cache_memory": 8 * SIZE * (3 * 2 * 16 + 32) * 8, "max_model_len": 64}


def alternate(llm: LLM, params: SamplingParams) -> list[Computed]:
    """Run two prompts in turn. Each displaces the other's blocks on the device."""
    return [run(llm, [prompt], params) for prompt in (PROMPT, OTHER, PROMPT, OTHER)]


def connector_of(llm: LLM) -> OffloadingConnector:
    connector = llm.engine.connector
    assert isinstance(connector, OffloadingConnector)
    return connector


def carry_out_nothing(*_: Any) -> None:
    """Stand for a thread that never comes to run."""


def no_step(_: Any) -> None:
    """Stand for a step that ends before its blocks move."""
    raise InterruptedError


def expected(world: World, drafter: str, params: SamplingParams) -> list[Computed]:
    with engine(world, drafter, None, **SMALL) as llm:
        return [run(llm, [prompt], params) for prompt in (PROMPT, OTHER)]


@pytest.mark.parametrize(("drafter", "entry"), [("eagle3", 3 * 32 + 32), ("dspark", 4 * 32 + 32), ("none", 2 * 32)])
def test_blocks_are_those_of_plain_copies(world: World, drafter: str, entry: int) -> None:
    """Tokens and tau, what was loaded and computed, and every byte of host memory."""
    found, memories = [], []
    small = {**SMALL, "kv_cache_memory": 8 * SIZE * entry * 8}
    for config in (HOST, LAYERWISE):
        with engine(world, drafter, config, **small) as llm:
            found.append(alternate(llm, DRAWN))
            connector = connector_of(llm)
            tier, memory = connector.tier, connector.memory
            hashes = [block_hash for block_hash in tier.pool._hashes if block_hash is not None]
            blocks = {each: tier.pool.find(each) for each in hashes}
            memories.append(
                {
                    (each, name): bytes(memory.payload(name, block))
                    for each, block in blocks.items()
                    if block is not None
                    for name in tier._parts[block]
                }
            )
            check_pool(tier.pool, tier.holders())
    plain, layered = found
    assert [(each.tokens, each.tau, each.known, each.read, each.loaded) for each in plain] == [
        (each.tokens, each.tau, each.known, each.read, each.loaded) for each in layered
    ]
    assert layered[2].loaded > 0
    assert memories[0] == memories[1]
    assert len(memories[0]) > 2 * WHOLE // SIZE


@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=pytest.mark.skipif(
    library_file() is None, reason="the native kernels are not built here"))])  # fmt: skip
def test_layers_are_waited_for_and_saved_in_order(world: World, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No layer runs before its blocks are loaded, each is saved once it has run; plain steps ask for nothing."""
    calls: list[tuple[str, int]] = []
    with engine(world, "eagle3", LAYERWISE, dtype="float32", kernels=kernels) as llm:
        connector = connector_of(llm)
        for name in ("save_kv_layer", "wait_for_layer_load"):
            method = getattr(connector, name)

            def call(layer: int, name: str = name, method: Callable[[int], None] = method) -> None:
                calls.append((name, layer))
                method(layer)

            monkeypatch.setattr(connector, name, call)
        first = run(llm, [PROMPT], GREEDY)
    layers = world.target.config.num_hidden_layers
    waits, saves = ([(name, i) for i in range(layers)] for name in ("wait_for_layer_load", "save_kv_layer"))
    assert calls == [call for pair in zip(waits, saves, strict=True) for call in pair]
    with engine(world, "eagle3", None, dtype="float32", kernels=kernels) as llm:
        assert run(llm, [PROMPT], GREEDY).tokens == first.tokens


@pytest.mark.parametrize("fault", ["fails", "never runs"])
def test_the_step_copies_what_the_thread_has_not(world: World, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "never runs":
        monkeypatch.setattr(layer_copies, "_carry_out", carry_out_nothing)
    else:
        work = layer_copies._carry_out

        class Failing(layer_copies._LayerCopy):
            """A copy that fails at first."""

            def run(self) -> None:
                if not hasattr(self, "has_failed"):
                    self.has_failed = True
                    raise MemoryError("no room")
                super().run()

        def failing(queue: Any, notes: Any) -> None:
            class Queue:
                def get(self) -> Any:
                    copy = queue.get()
                    if copy is not None:
                        copy.__class__ = Failing
                    return copy

            work(Queue(), notes)  # type: ignore[arg-type]

        monkeypatch.setattr(layer_copies, "_carry_out", failing)
    with engine(world, "eagle", LAYERWISE, **SMALL) as llm:
        found = alternate(llm, GREEDY)
    assert [each.tokens for each in found] == 2 * [each.tokens for each in expected(world, "eagle", GREEDY)]
    assert found[2].loaded > 0


@pytest.mark.skipif(library_file() is None, reason="the native kernels are not built here")
def test_an_error_between_layers_ends_the_step_and_no_more(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes through the compiled library. What the step had begun to save is given up; the next request is right."""
    with engine(world, "eagle", LAYERWISE, dtype="float32", kernels="native", **SMALL) as llm:
        connector = connector_of(llm)
        with monkeypatch.context() as patch:
            patch.setattr(connector, "save_kv_layer", lambda layer: 1 // layer)
            with pytest.raises(ZeroDivisionError):
                llm.generate([PROMPT], GREEDY, use_tqdm=False)
        assert not llm.engine.has_unfinished
        found = alternate(llm, GREEDY)
        check_pool(connector.tier.pool, connector.tier.holders())
    with engine(world, "eagle", None, dtype="float32", kernels="native", **SMALL) as llm:
        assert [run(llm, [prompt], GREEDY).tokens for prompt in (PROMPT, OTHER)] == [each.tokens for each in found[2:]]


def test_a_step_that_fails_before_its_pass_leaves_no_copy_behind(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks may be reused by the next step while nothing has been copied to them yet."""
    monkeypatch.setattr(layer_copies, "_carry_out", carry_out_nothing)
    with engine(world, "eagle", LAYERWISE, **SMALL) as llm:
        alternate(llm, GREEDY)
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.worker.drafter, "propose", lambda *_: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                llm.generate([PROMPT], GREEDY, use_tqdm=False)
        connector = connector_of(llm)
        # Before any other block is moved.
        assert not connector.has_layer_transfers
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.executor, "step", no_step)
            with pytest.raises(InterruptedError):
                llm.generate([OTHER], GREEDY, use_tqdm=False)
        # No step follows that would give up what these have begun.
        connector.update_connector_output(connector.get_finished())
        assert connector.tier.pool.num_free == connector.tier.pool.num_blocks
        found = alternate(llm, GREEDY)
        connector.update_connector_output(connector.get_finished())
        assert connector.tier.pool.num_free == connector.tier.pool.num_blocks
    assert [each.tokens for each in found] == 2 * [each.tokens for each in expected(world, "eagle", GREEDY)]


def test_samples_share_a_block_that_is_being_loaded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt ends within a loaded block, which the second sample copies in the very step that loads it."""
    monkeypatch.setattr(layer_copies, "_carry_out", carry_out_nothing)
    prompt, both = PROMPT[:WHOLE], SamplingParams(temperature=1, seed=5, max_tokens=6, n=2, ignore_eos=True)
    outputs = []
    for config in (None, LAYERWISE):
        with engine(world, "eagle", config, **{**SMALL, "kv_cache_memory": 2 * SMALL["kv_cache_memory"]}) as llm:
            for other in (PROMPT, OTHER, OTHER[1:], OTHER[2:]):
                run(llm, [other], GREEDY)
            before = llm.engine.scheduler.stats().external_prefix_hits
            outputs.append([each.token_ids for each in llm.generate([prompt], both, use_tqdm=False)[0].outputs])
            loaded = llm.engine.scheduler.stats().external_prefix_hits - before
    assert outputs[0] == outputs[1]
    assert loaded > 0
