"""Trees drafted behind the verification of the step before, on a simulated GPU: they are those of the step itself."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import LLM, SamplingParams
from specdec.core.request import Request
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.drafter import DraftsAhead
from specdec.draft_heads.drafting.tree_drafter import TreeDrafter
from specdec.kernels.types.upload import Download
from specdec.scheduling.draft_budget import DraftBudget
from specdec.scheduling.tree_sizer import TreeSize
from tests.fakes import save_random_block, save_random_eagle3, save_random_llama, save_shallow_llama
from tests.new_groups import new_group
from tests.profiles import by_day
from tests.simulated_gpu import GPU
from tests.triton_interpreter import grid_seed

pytestmark = pytest.mark.slow

SHAPE = DraftShape(3, 2, 6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ahead")
    target = save_random_llama(folder / "target", head_dim=16)
    save_shallow_llama(folder / "small", target)
    save_random_eagle3(folder / "head3", head_dim=16)
    save_random_block(folder / "dspark", "dspark", head_dim=16, num_hidden_layers=1)
    return folder


# Head, acceptance rule, whether each step's trees are of a drawn size, whether n-grams draft too, and further settings.
CASES: list[tuple[str, str, bool, bool, dict[str, Any]]] = [
    ("head3", "rejection", True, False, {}),
    ("dspark", "coupled", True, False, {}),
    ("head3", "coupled", True, False, {"draft_window_size": 5}),
    ("head3", "coupled", False, True, {}),
    ("dspark", "rejection", False, False, {"draft_window_size": 9}),
    ("small", "coupled", False, False, {}),
]


@pytest.mark.long
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("head", "rule", "sized", "chained", "settings"), by_day(CASES, 2))
def test_trees_are_those_that_the_step_would_draft(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    head: str,
    rule: str,
    sized: bool,
    chained: bool,
    settings: dict[str, Any],
) -> None:
    taken = taken_ahead(monkeypatch)
    draft = f"{folder / head},ngram" if chained else str(folder / head)
    ahead = steps_of(load(folder, draft, rule, settings), sized, monkeypatch)
    # The first request alone makes sure of one, unless trees are of drawn sizes or n-grams match.
    assert sum(taken) > 0 or sized or chained
    taken.clear()
    monkeypatch.setattr(TreeDrafter, "prepare_ahead", lambda *_: None)
    assert ahead == steps_of(load(folder, draft, rule, settings), sized, monkeypatch)
    assert not taken


def taken_ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each step adds how many trees it takes of those drafted ahead."""
    taken, places_of = list[int](), DraftsAhead.places_of

    def counted(self: DraftsAhead, rows: Any) -> dict[int, int]:
        places = places_of(self, rows)
        taken.append(len(places))
        return places

    monkeypatch.setattr(DraftsAhead, "places_of", counted)
    return taken


def load(folder: Path, draft: str, rule: str, settings: dict[str, Any]) -> LLM:
    return LLM(
        folder / "target",
        draft,
        device="cuda",
        dtype="float32",
        verify=rule,
        shape=SHAPE,
        adaptive_drafts=False,
        prefill_stretch=0,
        max_model_len=48,
        block_size=8,
        kv_cache_memory=1 << 18,
        **{"max_num_seqs": 2, **settings},
    )


def steps_of(llm: LLM, sized: bool, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the trees and outcomes of each step, of requests that come and go."""
    chance, steps, finish = random.Random(grid_seed()), list[Any](), llm.engine.worker.finish

    def watched() -> Any:
        outcome = finish()
        steps.append(([(tree.tokens, tree.parents) for tree in outcome.trees], outcome.acceptances))
        return outcome

    def drawn_size(_: DraftBudget, decoding: Sequence[Request], *, mixed: bool = False) -> TreeSize:  # noqa: ARG001
        return TreeSize(chance.randrange(SHAPE.nodes + 1), len(decoding))

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.worker, "finish", watched)
        if sized:
            patch.setattr(DraftBudget, "size", drawn_size)
        for index in range(4):
            params = SamplingParams(
                temperature=chance.choice([0.0, 0.8]) if index else 0.0,
                # Edited logits need tokens that only the host has; others are drafted for beside them.
                repetition_penalty=chance.choice([1.0, 1.0, 1.3]) if index else 1.0,
                seed=index,
                max_tokens=chance.randrange(4, 12) if index else 11,
                ignore_eos=True,
            )
            # Repeated, so that n-grams match.
            prompt = [chance.randrange(3, 60) for _ in range(chance.randrange(2, 4))] * chance.randrange(1, 4)
            for request in new_group(llm, prompt, params).requests:
                llm.engine.scheduler.add(request)
            for _ in range(chance.randrange(3)):
                llm.engine.step()
        while llm.engine.has_unfinished:
            llm.engine.step()
    return steps


@pytest.mark.long
@pytest.mark.usefixtures("gpu")
def test_padding_rows_have_no_drawn_trees(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph drafts for four rows where three requests run."""
    taken = taken_ahead(monkeypatch)
    params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=6, ignore_eos=True) for seed in range(3)]
    llm = load(folder, str(folder / "head3"), "rejection", {"max_num_seqs": 3})
    llm.generate([[5, 6, 7]] * 3, params, use_tqdm=False)
    assert 3 in taken


@pytest.mark.usefixtures("gpu")
def test_the_host_waits_for_what_was_asked_before_alone() -> None:
    with torch.cuda.device(GPU):
        first = Download([torch.tensor([1, 2], device=GPU), torch.tensor([[3]], device=GPU)])
        second = Download([torch.tensor([4], device=GPU)])
        assert first.read() == [[1, 2], [3]]
        assert second._numbers.tolist() != [4]
        assert second.read() == [[4]]


@pytest.mark.long
@pytest.mark.usefixtures("gpu")
def test_a_step_that_fails_is_not_followed(folder: Path) -> None:
    """What would have followed it writes to blocks that belong to others by then."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    llm = LLM(
        folder / "target",
        None,
        device="cuda",
        dtype="float32",
        max_model_len=64,
        max_num_seqs=1,
        block_size=8,
        kv_cache_memory=1 << 19,
    )
    other = [20, 21, 22, 23, 24, 25]
    expected = llm.generate([other], params, use_tqdm=False)[0].outputs[0].token_ids
    runner, asked, ran = llm.engine.worker.runner, list[int](), list[int]()
    prepare = runner.prepare

    def failing(*given: Any) -> Any:
        run = prepare(*given)
        asked.append(len(given[0][0].tokens))
        place = len(asked)

        def lost(tokens: Any = None) -> Any:
            ran.append(place)
            # The first plain pass, behind which the next one is prepared already.
            if asked[:place].count(1) == 1 and len(asked) > place:
                raise RuntimeError("lost")
            return run(tokens)

        return lost

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "prepare", failing)
        with pytest.raises(RuntimeError, match="lost"):
            llm.generate([[5, 6, 7, 8, 9, 10]], params, use_tqdm=False)
    assert asked.count(1) == 2
    assert llm.generate([other], params, use_tqdm=False)[0].outputs[0].token_ids == expected
    assert ran == [*range(1, len(asked))]
