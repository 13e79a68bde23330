"""The check at start of what a draft model drafts first."""

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec import LLM, SamplingParams
from specdec.building.draft_check import STEPS, FirstDrafts, first_drafts
from specdec.building.tap_probe import QUESTIONS, questions
from specdec.config import DEMO_HEADS
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from tests.fakes import save_random_head
from tests.specdec.saved_llama import edit_tensors
from tests.specdec.world import BLOCKS, VOCAB, World

pytestmark = pytest.mark.slow
TOLD = "the draft model drafts no better than chance: "
SMALL = {"kv_cache_memory": 8 << 20, "dtype": "float64"}


@pytest.fixture(autouse=True)
def tried_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines try their drafts, as they do outside of tests."""
    monkeypatch.setattr("specdec.building.engine_builder.questions", questions)


@contextmanager
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Collect what is warned of."""
    found: list[str] = []
    caplog.clear()
    with caplog.at_level(logging.INFO, "specdec"):
        yield found
    found += [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.long
@pytest.mark.parametrize("head", dict.fromkeys(DEMO_HEADS.values()), ids=lambda folder: folder.name)
@pytest.mark.parametrize("verify", ["coupled", "rejection"])
def test_a_trained_head_is_not_warned_of(head: Path, verify: str, caplog: pytest.LogCaptureFixture) -> None:
    with warnings(caplog) as told:
        LLM(draft=head, verify=verify, kv_cache_memory=8 << 20)
    assert not told
    assert f"of {len(QUESTIONS) * STEPS} are the target's tokens" in caplog.text


@pytest.mark.parametrize("draft", ["eagle", "eagle3", *BLOCKS])
def test_an_untrained_head_is_warned_of_once(world: World, draft: str, caplog: pytest.LogCaptureFixture) -> None:
    with warnings(caplog) as told:
        LLM(world.folder / "target", world.draft(draft), **SMALL)
    assert len(told) == 1
    assert told[0].startswith(TOLD)


@pytest.mark.long
def test_a_head_for_another_target_is_warned_of(world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The target itself as a draft model is always right, and no more so once its output matrix has other rows."""
    target, other = world.folder / "target", tmp_path / "other"
    with warnings(caplog) as told:
        LLM(target, draft=target, **SMALL)
    assert not told
    assert f"first drafts: {len(QUESTIONS) * STEPS} of {len(QUESTIONS) * STEPS} are" in caplog.text
    torch.manual_seed(0)
    rows = torch.randperm(VOCAB)
    shutil.copytree(target, other)
    edit_tensors(other, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"][rows]}))
    with warnings(caplog) as told:
        LLM(target, draft=other, **SMALL)
    assert [line[: len(TOLD)] for line in told] == [TOLD]


@pytest.mark.long
@pytest.mark.parametrize("draft", ["eagle", "dflash", "llama"])
def test_the_engine_is_as_it_was(world: World, draft: str) -> None:
    """Its cache, its figures, and what it generates: also of requests without a seed."""
    llm = LLM(world.folder / "target", world.draft(draft), seed=3, **SMALL)
    cache = llm.engine.worker.cache
    assert all(part[: cache.num_blocks].isnan().all() for part in cache.parts.values())
    stats = llm.stats()
    assert (stats.steps, stats.drafts_verified, stats.prefix_queries) == (0, 0, 0)
    unchecked = LLM(
        world.folder / "target", world.draft(draft), seed=3, adaptive_drafts=False, prefill_stretch=0, **SMALL
    )
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    found, wanted = (each.generate([[5, 6, 7]] * 3, params, use_tqdm=False) for each in (llm, unchecked))
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]


@pytest.mark.long
def test_it_says_the_same_every_time(world: World) -> None:
    llm = LLM(world.folder / "target", world.draft("eagle"), **SMALL)
    prompts = [[3, 4], [5] * 90]
    one, two = (first_drafts(llm.engine.executor, prompts, 200, llm.engine.worker.drafter.shape.slots) for _ in "ab")
    assert one == two
    assert len(one.drafted) == len(one.wanted) == len(prompts) * STEPS
    params = SamplingParams(temperature=0.0, max_tokens=STEPS + 1, ignore_eos=True)
    (plain,) = LLM(world.folder / "target", draft=None, **SMALL).generate([prompts[0]], params, use_tqdm=False)
    # No draft was right, so that each step has the next token of the first prompt.
    assert one.wanted[:: len(prompts)] == plain.token_ids[1:]


@pytest.mark.long
def test_without_room_nothing_is_tried(world: World, caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(world.folder / "target", world.draft("eagle"), **SMALL)
    blocks = llm.engine.worker.cache.num_blocks
    assert first_drafts(llm.engine.executor, [[1, 2]], 2 * (1 + STEPS), 8) == FirstDrafts([], [])
    assert first_drafts(llm.engine.executor, [[1, 2]], 200, 16 * blocks) == FirstDrafts([], [])
    with warnings(caplog) as told:
        LLM(world.folder / "target", world.draft("eagle"), dtype="float64", max_model_len=12)
    assert not told


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_weights_that_are_no_numbers_are_refused_by_name(world: World, tmp_path: Path, value: str) -> None:
    save_random_head(tmp_path / "head")

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        (name,) = (name for name in tensors if name.endswith("mlp.up_proj.weight"))
        tensors[name][1, 2] = float(value)

    edit_tensors(tmp_path / "head", spoil)
    with pytest.raises(CheckpointError, match=rf"mlp\.up_proj\.weight holds {value}; weights must be finite"):
        LLM(world.folder / "target", tmp_path / "head", **SMALL)


tokens = st.lists(st.integers(0, 30), min_size=32, max_size=32)


@given(tokens, st.integers(0, 30))
def test_one_token_for_all_is_no_better_than_chance(wanted: list[int], token: int) -> None:
    found = FirstDrafts([token] * len(wanted), wanted)
    assert found.hits == pytest.approx(found.chance * len(wanted))
    assert found.are_no_better_than_chance == (found.chance <= 0.25)


@given(st.permutations(range(32)), st.integers(0, 32))
def test_what_is_right_is_better_than_chance(wanted: list[int], hits: int) -> None:
    """Of 32 different tokens one is right by chance, and two deviations are two more."""
    found = FirstDrafts([*wanted[:hits], *(-1 - token for token in wanted[hits:])], wanted)
    assert found.hits == hits
    assert found.are_no_better_than_chance == (hits <= 1)
