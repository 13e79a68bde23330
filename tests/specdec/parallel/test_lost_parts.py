"""Blocks of which one rank alone has lost its part, or cannot reach it: all ranks do without, and no token changes."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec import LLM
from specdec.core.commands import Abort
from specdec.core.request import Request
from specdec.kv_transfer import disk_store
from specdec.kv_transfer.disk_store import DiskStore
from tests.specdec.kv_transfer.engines import DRAWN, PROMPT, SIZE, WHOLE, Computed, disk, engine, file_of_key, run
from tests.specdec.parallel.connected_ranks import Ranks, connected_ranks
from tests.specdec.world import World

pytestmark = pytest.mark.slow


class Stored:
    """A folder in which two ranks have stored `PROMPT`.

    Attributes:
        folder: the folder.
        files: of rank 1, by part, block after block, relative to the folder.
    """

    def __init__(self, world: World, folder: Path) -> None:
        self.folder = folder
        with connected_ranks(world, "eagle", disk(folder)) as ranks:
            run(ranks.llm, [PROMPT], DRAWN)
            self.files = {part: files_of(ranks, part) for part in ("target", "features", "head")}


def hashes_of(llm: LLM) -> list[bytes]:
    """Return those of the blocks of `PROMPT`."""
    group = llm.engine.handle(llm.request_maker.add(PROMPT, DRAWN))
    llm.engine.scheduler.manager.hash_blocks(group.requests[0])
    llm.engine.handle(Abort(group.request_id))
    return group.requests[0].block_hashes


def files_of(ranks: Ranks, part: str) -> list[Path]:
    (store,), keys = ranks.connectors[1]._stores, ranks.connectors[1]._key
    assert isinstance(store, DiskStore)
    paths = [store._path(disk_store._name_of(keys(part, each))) for each in hashes_of(ranks.llm)]
    return [path.relative_to(store.root.parent) for path in paths]


@pytest.fixture(scope="module")
def stored(world: World, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    return Stored(world, tmp_path_factory.mktemp("stored"))


@pytest.fixture(scope="module")
def alone(world: World) -> Computed:
    """What one rank computes without a connector."""
    with engine(world, "eagle", None) as llm:
        return run(llm, [PROMPT], DRAWN)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-9] ^= 4
    file.write_bytes(data)


@pytest.mark.long
@pytest.mark.parametrize(
    ("part", "damage"),
    [
        ("target", flip),
        ("target", Path.unlink),
        ("features", flip),
        ("features", Path.unlink),
        ("head", flip),
    ],
)
def test_a_block_that_rank_1_alone_has_lost(
    world: World,
    tmp_path: Path,
    stored: Stored,
    alone: Computed,
    part: str,
    damage: Callable[[Path], None],
) -> None:
    """No rank uses it, so that all go on alike; once computed, it is stored again."""
    shutil.copytree(stored.folder, tmp_path, dirs_exist_ok=True)
    damage(tmp_path / stored.files[part][2])
    loaded = 2 * SIZE if part == "target" else WHOLE
    for expected in (loaded, WHOLE):
        with connected_ranks(world, "eagle", disk(tmp_path)) as ranks:
            found = run(ranks.llm, [PROMPT], DRAWN)
            ranks.check_alike()
        assert found.tokens == alone.tokens
        assert found.loaded == expected
        if part == "target":
            assert found.tau == alone.tau
            assert found.known == alone.known - expected


@pytest.mark.long
@pytest.mark.parametrize("part", ["features", "head"])
def test_ranks_that_have_stored_different_features_use_none(
    world: World, tmp_path: Path, stored: Stored, alone: Computed, part: str
) -> None:
    """Records of two engines may differ in the last bit. Ranks that read different ones would draft different trees."""
    shutil.copytree(stored.folder, tmp_path, dirs_exist_ok=True)
    with connected_ranks(world, "eagle", disk(tmp_path)) as ranks:
        (store,), keys = ranks.connectors[1]._stores, ranks.connectors[1]._key
        key = keys(part, hashes_of(ranks.llm)[1])
        payload = memoryview(bytearray(len(ranks.connectors[1].memory.payload(part, 0))))
        assert store.read([key], [payload]) == [True]
        payload[0] ^= 1
        file_of_key(store, key).unlink()
        store.write([key], [payload])
        found = run(ranks.llm, [PROMPT], DRAWN)
        ranks.check_alike()
    assert found.tokens == alone.tokens
    assert found.loaded == WHOLE


@pytest.mark.long
def test_a_block_that_an_earlier_stage_has_lost(world: World, tmp_path: Path, alone: Computed) -> None:
    """It has no features and no draft model, and lacks none."""
    stages = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    with connected_ranks(world, "eagle", disk(tmp_path), **stages) as ranks:
        run(ranks.llm, [PROMPT], DRAWN)
        lost = files_of(ranks, "target")[2]
    flip(tmp_path / lost)
    for loaded in (2 * SIZE, WHOLE):
        with connected_ranks(world, "eagle", disk(tmp_path), **stages) as ranks:
            found = run(ranks.llm, [PROMPT], DRAWN)
        assert (found.tokens, found.tau, found.loaded) == (alone.tokens, alone.tau, loaded)


@pytest.mark.long
def test_a_block_that_rank_1_evicts_between_query_and_read(
    world: World, tmp_path: Path, stored: Stored, alone: Computed, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(stored.folder, tmp_path, dirs_exist_ok=True)
    read = DiskStore.read

    def vanishing(self: DiskStore, keys: Any, payloads: Any) -> list[bool]:
        if self.root.name == "rank-1-of-2" and len(keys) == WHOLE // SIZE:
            file_of_key(self, keys[2]).unlink()
        return read(self, keys, payloads)

    monkeypatch.setattr(DiskStore, "read", vanishing)
    with connected_ranks(world, "eagle", disk(tmp_path)) as ranks:
        found = run(ranks.llm, [PROMPT], DRAWN)
    assert (found.tokens, found.loaded) == (alone.tokens, 2 * SIZE)


@pytest.mark.long
def test_a_store_of_rank_1_that_hangs_delays_nobody(
    world: World, stored: Stored, alone: Computed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hanging, count_held = threading.Event(), DiskStore.count_held

    def hang(self: DiskStore, keys: Any) -> int:
        if self.root.name == "rank-1-of-2":
            hanging.wait(120)
        return count_held(self, keys)

    monkeypatch.setattr(DiskStore, "count_held", hang)
    with connected_ranks(world, "eagle", disk(stored.folder, load_timeout=0.3)) as ranks:
        # Without a whole block it has nothing to look for.
        handle, add = ranks.llm.engine.handle, ranks.llm.request_maker.add
        late, early = (handle(add(prompt, DRAWN)).requests[0] for prompt in (PROMPT, PROMPT[: SIZE - 1]))
        order: list[Request] = []
        ranks.llm.engine.step()
        assert ranks.llm.stats().waiting_for_kv == 1
        while ranks.llm.engine.has_unfinished:
            order += [request for request in ranks.llm.engine.step() if request.finished]
        assert ranks.connectors[0].reads.is_stalled(0)
        hanging.set()
    assert order == [early, late]
    assert late.completion().token_ids == alone.tokens[0]
    assert "took longer than 0.3 s" in caplog.text


@pytest.mark.long
def test_a_failing_store_of_rank_1_is_named(
    world: World, stored: Stored, alone: Computed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(self: DiskStore, keys: Any) -> int:
        if self.root.name == "rank-1-of-2":
            raise OSError(5, "Input/output error")
        return len(keys)

    monkeypatch.setattr(DiskStore, "count_held", failing)
    with connected_ranks(world, "eagle", disk(stored.folder)) as ranks:
        found = run(ranks.llm, [PROMPT], DRAWN)
    assert (found.tokens, found.loaded) == (alone.tokens, 0)
    # One failure, told by both ranks, which are threads of this process.
    assert caplog.text.count("rank 1: disk") == 2
    assert "Input/output error; tokens are computed instead" in caplog.text
