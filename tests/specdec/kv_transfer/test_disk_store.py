"""The disk tier: whole files or none, limits, and what happens to damaged, foreign and vanished ones."""

import logging
import os
import time
from pathlib import Path

import pytest

from specdec.kv_transfer.block_store import HEADER_SIZE, StoreError
from specdec.kv_transfer.disk_store import DiskStore, rank_folder
from specdec.kv_transfer.notes import Notes
from tests.specdec.kv_transfer.engines import file_of_key

SIZE = 100
RECORD = SIZE + HEADER_SIZE


@pytest.fixture
def notes() -> Notes:
    return Notes(logging.getLogger("specdec.tests"))


def opened(root: Path, notes: Notes, blocks: int = 9) -> DiskStore:
    return DiskStore(root, blocks * RECORD, notes)


def put(store: DiskStore, *keys: str) -> None:
    store.write(keys, [memoryview(key.encode() * SIZE)[:SIZE] for key in keys])


def get(store: DiskStore, *keys: str) -> list[bytes | None]:
    payloads = [memoryview(bytearray(SIZE)) for _ in keys]
    came = store.read(keys, payloads)
    return [bytes(payload) if each else None for payload, each in zip(payloads, came, strict=True)]


def file_of(root: Path) -> Path:
    (file,) = root.glob("??/*.kv")
    return file


def test_blocks_survive_a_restart(tmp_path: Path, notes: Notes) -> None:
    put(opened(tmp_path, notes), "a", "b")
    store = opened(tmp_path, notes)
    assert store.count_held(["a", "b", "c"]) == 2
    assert get(store, "a", "c", "b") == [b"a" * SIZE, None, b"b" * SIZE]
    assert not list(tmp_path.rglob("*.part"))


def test_files_of_another_user_are_read(tmp_path: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their time of use cannot be set."""
    store = opened(tmp_path, notes)
    put(store, "a")

    def denied(_: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "utime", denied)
    assert get(store, "a") == [b"a" * SIZE]


def test_engines_share_a_folder(tmp_path: Path, notes: Notes) -> None:
    """Each finds what the other has written since both were started, and counts what it has read to its limit."""
    one, other = opened(tmp_path, notes), opened(tmp_path, notes, 2)
    put(one, "a", "b")
    assert other.count_held(["a", "b", "c"]) == 2
    assert get(other, "b", "a") == [b"b" * SIZE, b"a" * SIZE]
    put(other, "c")
    assert [one.count_held([key]) for key in "abc"] == [1, 0, 1]
    assert get(one, "b", "c") == [None, b"c" * SIZE]
    # What is there is not written again.
    before = file_of_key(one, "a").stat().st_ino
    put(other, "a")
    assert file_of_key(one, "a").stat().st_ino == before


def test_the_least_recently_used_go_first(tmp_path: Path, notes: Notes) -> None:
    store = opened(tmp_path, notes, 2)
    put(store, "a", "b")
    get(store, "a")
    put(store, "c")
    assert [store.count_held([key]) for key in "abc"] == [1, 0, 1]
    now = time.time()
    for age, file in enumerate(sorted(tmp_path.glob("??/*.kv"))):
        os.utime(file, (now - age, now - age))
    # With less room than before, the newest stay.
    assert len(opened(tmp_path, notes, 1)._files) == 1
    assert len(list(tmp_path.glob("??/*.kv"))) == 1


def test_blocks_that_another_engine_has_read_stay(tmp_path: Path, notes: Notes) -> None:
    writer, reader = opened(tmp_path, notes, 2), opened(tmp_path, notes)
    put(writer, "a", "b")
    # The clock of file systems may be some milliseconds behind.
    time.sleep(0.02)
    assert get(reader, "a") == [b"a" * SIZE]
    put(writer, "c")
    assert [writer.count_held([key]) for key in "abc"] == [1, 0, 1]
    # Neither is used twice, nor is one that is gone.
    file_of_key(writer, "a").unlink()
    put(writer, "d", "e")
    assert [writer.count_held([key]) for key in "abcde"] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data[:50], "bytes where"),
        (lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:], "wrong checksum"),
        (lambda data: b"x" * len(data), "not a block"),
        (lambda _: b"", "bytes where"),
    ],
)
def test_a_damaged_or_foreign_file_is_ignored_with_a_line(
    tmp_path: Path, notes: Notes, caplog: pytest.LogCaptureFixture, damage: object, words: str
) -> None:
    put(opened(tmp_path, notes), "a")
    file = file_of(tmp_path)
    assert callable(damage)
    file.write_bytes(damage(file.read_bytes()))
    store = opened(tmp_path, notes)
    assert get(store, "a") == [None]
    notes.flush()
    assert f"{file} is ignored" in caplog.text
    assert words in caplog.text
    # The block can be stored again.
    assert store.count_held(["a"]) == 0
    put(store, "a")
    assert get(store, "a") == [b"a" * SIZE]


def test_a_whole_file_of_another_block_is_ignored(tmp_path: Path, notes: Notes) -> None:
    store = opened(tmp_path, notes)
    put(store, "a", "b")
    a, b = (file_of_key(store, key) for key in "ab")
    a.write_bytes(b.read_bytes())
    assert get(store, "a", "b") == [None, b"b" * SIZE]


def test_a_file_that_vanishes_counts_as_absent(tmp_path: Path, notes: Notes) -> None:
    store = opened(tmp_path, notes)
    put(store, "a")
    file_of(tmp_path).unlink()
    assert get(store, "a") == [None]
    assert notes.take() == []


def test_other_files_are_left_alone(tmp_path: Path, notes: Notes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    old, new = tmp_path / "old.part", tmp_path / "new.part"
    for file in (old, new):
        file.write_text("unfinished")
    os.utime(old, (0, 0))
    opened(tmp_path, notes)
    assert "1 files that are no blocks are ignored" in caplog.text
    assert (old.exists(), new.exists()) == (False, True)


def test_files_of_ranks_are_no_others_affair(tmp_path: Path, notes: Notes, caplog: pytest.LogCaptureFixture) -> None:
    """An engine of one rank in the same folder neither counts nor evicts them."""
    folders = [rank_folder(tmp_path, rank, 2) for rank in range(2)]
    assert len({*folders, rank_folder(tmp_path, 0, 1)}) == 3
    for folder in folders:
        put(opened(folder, notes), "a", "b")
    single = opened(rank_folder(tmp_path, 0, 1), notes, 1)
    put(single, "c", "d")
    assert len(single._files) == 1
    assert all(opened(folder, notes).count_held(["a", "b"]) == 2 for folder in folders)
    assert "are ignored" not in caplog.text


def test_a_full_disk_is_an_error_of_the_store(tmp_path: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path, notes)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("specdec.kv_transfer.disk_store.os.fsync", full)
    with pytest.raises(StoreError, match="No space left on device"):
        put(store, "a")
    assert store.count_held(["a"]) == 0
    assert not [*tmp_path.rglob("*.kv"), *tmp_path.rglob("*.part")]


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, notes: Notes) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"root_dir .*file.*; give a folder"):
        opened(tmp_path / "file", notes)
