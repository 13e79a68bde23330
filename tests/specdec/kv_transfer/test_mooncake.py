"""One Mooncake pool under two engines, and the faults of a pool. Skipped where Mooncake is not installed."""

import logging
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specdec import LLM, SamplingParams
from specdec.kv_transfer import mooncake_store, offloading_connector
from specdec.kv_transfer.block_store import StoreError
from specdec.kv_transfer.kv_transfer_config import MooncakeSettings
from specdec.kv_transfer.mooncake_store import MooncakeStore
from specdec.kv_transfer.notes import Notes
from specdec.kv_transfer.offloading_connector import OffloadingConnector
from tests.fakes import save_random_head, save_random_llama
from tests.new_groups import new_group
from tests.specdec.kv_transfer.engines import DRAWN, GREEDY, engine, flush, run
from tests.specdec.kv_transfer.mooncake import Master, mooncake_master, needs_mooncake
from tests.specdec.world import World

pytestmark = needs_mooncake
SHARED = 1024
PREFIX = [3 + (11 * i + i * i // 7) % 90 for i in range(SHARED)]
LONG = {"max_model_len": 1200, "kv_cache_memory": 4 << 20}


@pytest.fixture(scope="module")
def long_world(world: World, tmp_path_factory: pytest.TempPathFactory) -> World:
    """A model with room for 1,200 tokens."""
    folder = tmp_path_factory.mktemp("long")
    target = save_random_llama(folder / "target", max_position_embeddings=1280)
    save_random_head(folder / "head", max_position_embeddings=1280)
    return World(folder, target, world.tokenizer)


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    with mooncake_master(tmp_path_factory.mktemp("mooncake")) as running:
        yield running


def expected(world: World, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    with engine(world, "eagle", None, **LONG) as llm:
        return run(llm, prompts, params).tokens


def store_of(llm: LLM) -> MooncakeStore:
    connector = llm.engine.connector
    assert isinstance(connector, OffloadingConnector)
    (store,) = connector._stores
    assert isinstance(store, MooncakeStore)
    return store


def test_a_prefix_is_computed_once_for_two_engines(
    long_world: World, master: Master, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = [*PREFIX, 5, 6, 7]
    config = master.config(cache_prefix="share")
    with engine(long_world, "eagle", config, **LONG) as one, engine(long_world, "eagle", config, **LONG) as other:
        first = run(one, [prompt], DRAWN)
        flush(one)
        second = run(other, [prompt], DRAWN)
        # A byte of a stored block flips.
        with engine(long_world, "eagle", config, **LONG) as third:
            store = store_of(third)._connected()
            connector = third.engine.connector
            hashes = [each for each in one.engine.scheduler.manager.pool._hashes if each is not None]
            key = connector._key("target", hashes[10])
            record = bytearray(store.get(key))
            record[777] ^= 1
            assert store.remove(key, True) == 0
            assert store.put(key, bytes(record)) == 0
            last = run(third, [prompt], DRAWN)
    assert first.tokens == second.tokens == last.tokens == expected(long_world, [prompt], DRAWN)
    assert first.tau == second.tau == last.tau
    assert second.loaded == SHARED
    assert second.known == first.known - SHARED
    assert second.read == first.read - SHARED
    # Blocks in front of the damaged one are loaded, the others computed.
    assert last.loaded < SHARED
    assert last.known == first.known - last.loaded
    assert caplog.text.count("is ignored") == 1


def small_store(master: Master, notes: Notes) -> MooncakeStore:
    config = master.config()["kv_connector_extra_config"]
    own = {name: value for name, value in config.items() if name not in ("cpu_bytes_to_use", "load_timeout")}
    return MooncakeStore(MooncakeSettings(**own), 4096, 4, notes)


@pytest.fixture(scope="module")
def pool(master: Master) -> Iterator[MooncakeStore]:
    """A client of small records."""
    store = small_store(master, Notes(logging.getLogger("specdec.tests")))
    yield store
    store.close()


def test_publish_query_invalidate(master: Master, pool: MooncakeStore) -> None:
    notes = Notes(logging.getLogger("specdec.tests"))
    store, other = pool, small_store(master, notes)
    store.write(["a", "b"], [memoryview(b"x" * 100), memoryview(b"y" * 200)])
    assert other.count_held(["a", "b", "c"]) == 2
    payloads = [memoryview(bytearray(size)) for size in (100, 50, 200)]
    assert other.read(["a", "c", "b"], payloads) == [True, False, True]
    assert (bytes(payloads[0]), bytes(payloads[2])) == (b"x" * 100, b"y" * 200)
    other._connected().batch_remove(["a"], True)
    assert store.count_held(["a", "b"]) == 0
    assert notes.take() == []
    # Two engines that write the same blocks at the same time do not disturb each other.
    keys = [str(number) for number in range(40)]
    with ThreadPoolExecutor(2) as threads:
        for place in range(0, 40, 4):
            some = keys[place : place + 4]
            writes = [threads.submit(each.write, some, [memoryview(bytes(4000))] * 4) for each in (store, other)]
            assert [write.result() for write in writes] == [None, None]
    assert store.count_held(keys) == 40
    other.close()


class Refusing:
    """A client whose transfers end with given codes."""

    def __init__(self, codes: list[int]) -> None:
        self.codes = codes

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [0] * len(keys)

    def batch_get_into(self, *_: object) -> list[int]:
        return self.codes

    batch_put_from = batch_get_into


@pytest.mark.parametrize(
    ("operation", "codes", "fails"),
    [
        ("read", [-703, -704], False),
        ("read", [-707, -712], False),
        ("read", [-800, -704], True),
        ("read", [-900, -900], True),
        ("write", [0, -705], False),
        ("write", [-703, 0], False),
        ("write", [-200, 0], True),
        ("write", [-800, 0], True),
    ],
)
def test_codes_of_transfers(
    pool: MooncakeStore, monkeypatch: pytest.MonkeyPatch, operation: str, codes: list[int], fails: bool
) -> None:
    """A record that another engine is writing, or that went during a read, is absent; other codes are failures."""
    monkeypatch.setattr(pool, "_store", Refusing(codes))
    call = getattr(pool, operation)
    payloads = [memoryview(bytearray(100))] * 2
    if fails:
        with pytest.raises(StoreError):
            call(["a", "b"], payloads)
    else:
        assert call(["a", "b"], payloads) == {"read": [False, False], "write": None}[operation]


def test_a_master_that_hangs_delays_the_start_by_no_more_than_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = Notes(logging.getLogger("specdec.tests"))
    monkeypatch.setattr(mooncake_store, "CONNECT_TIMEOUT", 0.2)
    with mooncake_master(tmp_path) as master:
        master.process.send_signal(signal.SIGSTOP)
        store = small_store(master, notes)
        start = time.monotonic()
        with pytest.raises(StoreError, match="no master answers"):
            store.count_held(["a"])
        assert time.monotonic() - start < 60
    assert len(notes.take()) == 1


def test_requests_survive_a_full_pool(long_world: World, master: Master, caplog: pytest.LogCaptureFixture) -> None:
    from mooncake.store import ReplicateConfig

    prompts = [[token % 90 + 3 for token in PREFIX[i : 300 + i]] for i in range(2)]
    kept = ReplicateConfig()
    kept.with_hard_pin = True
    config = master.config(cache_prefix="full", global_segment_size=16 << 20)
    with engine(long_world, "eagle", config, **LONG) as llm:
        pool, number = store_of(llm)._connected(), 0
        for size in (1 << 20, 1 << 12):
            while pool.put(f"full {number} {size}", bytes(size), kept) == 0:
                number += 1
        results = [run(llm, [prompt], GREEDY) for prompt in (*prompts, *prompts)]
        flush(llm)
    wanted = expected(long_world, prompts, GREEDY)
    assert [result.tokens[0] for result in results] == [*wanted, *wanted]
    assert "the pool is full" in caplog.text


def test_requests_survive_the_end_of_the_master(
    long_world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed while requests wait for blocks, run, and are to come."""
    monkeypatch.setattr(offloading_connector, "FLUSH", 1)
    prompts = [[token % 90 + 3 for token in PREFIX[i : 600 + i]] for i in range(4)]
    with mooncake_master(tmp_path) as master:
        config = master.config(load_timeout=1)
        with engine(long_world, "eagle", config, **LONG) as one, engine(long_world, "eagle", config, **LONG) as other:
            run(one, prompts[:2], GREEDY)
            flush(one)
            groups = [new_group(other, prompt, GREEDY).requests[0] for prompt in prompts]
            for request in groups[:3]:
                other.engine.scheduler.add(request)
            other.engine.step()
            master.kill()
            other.engine.scheduler.add(groups[3])
            while other.engine.has_unfinished:
                other.engine.step()
            outputs = [request.completion().token_ids for request in groups]
    assert outputs == expected(long_world, prompts, GREEDY)
    assert "tokens are computed instead" in caplog.text or "took longer than" in caplog.text
