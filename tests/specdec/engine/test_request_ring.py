"""Requests kept as training data: what is kept, in how many bytes, and what happens where that fails."""

import json
import logging
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec import LLM, BeamSearchParams, SamplingParams
from specdec.core.request import Request
from specdec.engine import request_ring
from specdec.engine.request_ring import LONGEST, Kept, RequestRing, RingFolder
from specdec.text.detokenizer import Detokenizer
from specdec.train_eagle.data.prepared_data import PreparedData
from specdec.verify.sampling import Sampling
from tests.specdec.world import World

PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=9, ignore_eos=True)
PROMPTS = [[3, 4, 5], [6, 7]]


def load(world: World, folder: Path | None, **settings: Any) -> LLM:
    given = {"dtype": "float64", "adaptive_drafts": False, "collect_drafts_share": 1.0, **settings}
    return LLM(world.folder / "target", world.draft("eagle"), collect_drafts=folder, **given)


def kept(folder: Path) -> list[Kept]:
    """Return what `specdec train` reads of a folder."""
    return [Kept(list(sample.token_ids), sum(sample.mask)) for sample in PreparedData(folder).load()]


def ended(num_prompt: int, num_output: int, finish_reason: str | None = "stop") -> Request:
    tokens = list(range(num_prompt + num_output))
    given = (tokens, num_prompt, SamplingParams(), Sampling(), 10**6, frozenset[int](), Detokenizer(None, ()))
    return Request("r", *given, finish_reason=finish_reason)


@pytest.mark.long
def test_requests_that_end_well_are_kept_as_training_reads_them(world: World, tmp_path: Path) -> None:
    plain = load(world, None)
    assert plain.engine.ring is None
    expected = [output.token_ids for output in plain.generate(PROMPTS, PARAMS, use_tqdm=False)]
    with load(world, tmp_path / "ring") as llm:
        found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert [output.token_ids for output in found] == expected
        both = llm.generate([9, 9, 9], SamplingParams(n=2, seed=1, max_tokens=4, ignore_eos=True), use_tqdm=False)[0]
        aborted = llm.stream([8, 8], PARAMS)
        next(aborted)
        aborted.close()
        llm.beam_search([[3, 4]], BeamSearchParams(beam_width=2, max_tokens=3))
    wanted = [Kept([*prompt, *tokens], 9) for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    wanted += [Kept([9, 9, 9, *one.token_ids], 4) for one in both.outputs]
    assert sorted(kept(tmp_path / "ring")) == sorted(wanted)
    masks = [list(sample.mask) for sample in PreparedData(tmp_path / "ring").load()]
    assert all(mask == sorted(mask) for mask in masks)
    # Another engine goes on there.
    with load(world, tmp_path / "ring") as llm:
        llm.generate(PROMPTS[0], PARAMS, use_tqdm=False)
    assert sorted(kept(tmp_path / "ring")) == sorted([*wanted, wanted[0]])


def test_an_engine_that_is_not_built_gives_the_folder_up(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("specdec.llm.build_engine", Mock(side_effect=RuntimeError("no room")))
        # The error keeps the constructor's variables.
        with pytest.raises(RuntimeError, match="no room") as caught:
            load(world, tmp_path / "ring")
    load(world, tmp_path / "ring").close()
    assert caught.value.__traceback__ is not None


def test_a_share_of_the_requests_is_kept_and_of_long_ones_the_end(tmp_path: Path) -> None:
    ring = RequestRing(RingFolder(tmp_path / "half", 1 << 20, "m"), 0.5)
    for _ in range(400):
        ring.keep(ended(2, 3))
    ring.close()
    assert 100 < len(kept(tmp_path / "half")) < 300
    ring = RequestRing(RingFolder(tmp_path / "all", 1 << 20, "m"), 1.0)
    for reason in ("abort", "error", None):
        ring.keep(ended(2, 3, reason))
    for prompt, output in ((2, 0), (LONGEST, 3), (2, LONGEST + 5), (1, 1)):
        ring.keep(ended(prompt, output, "length"))
    ring.close()
    found = kept(tmp_path / "all")
    assert [(len(one.token_ids), one.num_output) for one in found] == [(LONGEST, 3), (LONGEST, LONGEST), (2, 1)]
    assert found[0].token_ids[-1] == LONGEST + 2
    assert found[1].token_ids == list(range(7, LONGEST + 7))


def test_a_file_is_written_before_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_ring, "SECONDS", 0.05)
    ring = RequestRing(RingFolder(tmp_path / "ring", 1 << 20, "m"), 1.0)
    assert (tmp_path / "ring").stat().st_mode & 0o777 == 0o700
    for number in (1, 2):
        ring.keep(ended(2, number))
        end = time.monotonic() + 60
        while len(kept(tmp_path / "ring")) < number:
            assert time.monotonic() < end
            time.sleep(0.01)
    ring.close()


@pytest.mark.long
@given(
    limit=st.integers(2000, 8000),
    files=st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=5), min_size=1, max_size=40),
)
def test_the_newest_stay_within_the_limit(
    limit: int, files: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("ring")
    written = [[Kept([number] * length, 1) for length in lengths] for number, lengths in enumerate(files)]
    folder, largest = RingFolder(root, limit, "m"), 0
    for number, requests in enumerate(written):
        if number == len(written) // 2:
            # As after a restart.
            folder.close()
            folder = RingFolder(root, limit, "m")
        folder.add(requests)
        sizes = [file.stat().st_size for file in root.glob("requests-*")]
        largest = max(largest, *sizes)
        assert sum(sizes) <= limit
        found, newest = kept(root), [one for each in written[: number + 1] for one in each]
        assert found == newest[len(newest) - len(found) :]
        assert len(sizes) == number + 1 or sum(sizes) > limit - largest
    folder.close()


def test_a_killed_process_leaves_data_that_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At whatever place: behind a file, behind a part of it, and behind an index without the oldest files."""
    folder = RingFolder(tmp_path, 4000, "m")
    first, second = [Kept([1] * 30, 1)], [Kept([2] * 500, 1)]
    folder.add(first)
    with monkeypatch.context() as patch:
        patch.setattr(folder, "_write_index", lambda: None)
        folder.add(second)
    folder.close()
    (tmp_path / "requests-00000007.safetensors.tmp").write_bytes(b"a part")
    (tmp_path / "notes.txt").write_text("not ours")
    assert kept(tmp_path) == first
    folder = RingFolder(tmp_path, 4000, "m")
    assert {file.name for file in tmp_path.glob("requests-*")} == {"requests-00000000.safetensors"}
    assert (tmp_path / "notes.txt").exists()
    folder.add(second)
    assert kept(tmp_path) == [*first, *second]


def test_folders_that_cannot_be_used_are_refused_at_the_start(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for other in ({"settings": {"format": 1}, "shards": []}, []):
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / "index.json").write_text(json.dumps(other))
        with pytest.raises(ValueError, match=r"other: holds other data .* not requests of target; give another folder"):
            load(world, tmp_path / "other")
    with pytest.raises(ValueError, match=r"file/ring: Not a directory; give a folder that can be written"):
        load(world, tmp_path / "file" / "ring")
    with (
        load(world, tmp_path / "ring"),
        pytest.raises(ValueError, match="ring: another engine writes there; give a folder of its own"),
    ):
        load(world, tmp_path / "ring")
    for name, value in (("share", 0), ("share", 1.5), ("limit", 0)):
        with pytest.raises(ValueError, match=f"collect_drafts_{name} is {value}; it must be"):
            load(world, tmp_path / "ring", **{f"collect_drafts_{name}": value})


@pytest.mark.long
def test_a_full_disk_ends_the_collection_and_no_request(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(RingFolder, "add", Mock(side_effect=OSError(28, "No space left on device")))
    # Each request makes a file.
    monkeypatch.setattr(request_ring, "FILE_TOKENS", 1)
    caplog.set_level(logging.WARNING)
    with load(world, tmp_path) as llm:
        ring = llm.engine.ring
        assert ring is not None
        expected = llm.generate(PROMPTS[0], PARAMS, use_tqdm=False)[0].token_ids
        while not ring._problems:
            time.sleep(0.01)
        for _ in range(3):
            assert llm.generate(PROMPTS[0], PARAMS, use_tqdm=False)[0].token_ids == expected
    told = [record.message for record in caplog.records]
    assert told == [f"collect_drafts {tmp_path}: no further requests are kept: [Errno 28] No space left on device"]
