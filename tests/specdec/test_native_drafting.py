"""Drafting in one call against reading and searching level by level in Python."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import LLM, DraftShape, SamplingParams
from specdec.draft_heads.drafting.drafter import DraftRow
from specdec.draft_heads.drafting.tree_drafter import TreeDrafter
from specdec.kernels.native.library import library_file
from specdec.kernels.types.settings import Quantization
from specdec.kernels.types.tree import DraftTree
from tests.fakes import save_random_block
from tests.profiles import by_day
from tests.specdec.world import BLOCKS, DRAFTS, VOCAB, World

pytestmark = pytest.mark.skipif(library_file() is None, reason="the native kernels are not built here")

PARAMS = {
    "greedy": [SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)] * 3,
    "sampled": [SamplingParams(temperature=t, seed=7, max_tokens=24, ignore_eos=True) for t in (0.5, 1.0, 0.0)],
    "filtered": [
        SamplingParams(temperature=t, seed=7, max_tokens=24, ignore_eos=True, **limits)
        for t, limits in ((0.8, {"top_k": 6, "top_p": 0.9}), (1.5, {"min_p": 0.02, "top_p": 0.8}), (1.0, {}))
    ],
}


def _values(tree: DraftTree) -> list[float]:
    assert len(tree) == 0 or tree.read_values is not None
    return [] if tree.read_values is None else list(tree.read_values())


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("draft", ["eagle", "eagle3", "dflash", "dspark", "gated", "rnn", "llama"])
@pytest.mark.parametrize(
    ("shape", "quantization", "window"),
    by_day(
        [
            (DraftShape(5, 4, 30), "none", 7),
            (DraftShape(30, 3, 80), "q8", None),
            (DraftShape(4, 3, 9, min_reach=0.3), "none", None),
            (DraftShape(5, 4, 30), "none", None),
            (DraftShape(4, 3, 9, min_reach=0.3), "q8", 11),
        ],
        few=5,
        short=2,
    ),
)
def test_trees_are_the_same(
    world: World,
    draft: str,
    params: str,
    shape: DraftShape,
    quantization: Quantization,
    window: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if draft in DRAFTS:
        folder = world.draft(draft)
    else:
        # A DSpark head whose Markov head is of another kind.
        folder = tmp_path
        save_random_block(folder, draft)
    llm = LLM(
        world.folder / "target",
        folder,
        dtype="float32",
        kernels="native",
        quantization=quantization,
        shape=shape,
        draft_window_size=window,
        adaptive_drafts=False,
    )
    drafter = llm.engine.worker.drafter
    assert isinstance(drafter, TreeDrafter)
    one_call, propose = drafter.one_call, drafter.propose
    assert one_call is not None
    searches = 0

    def both(rows: Sequence[DraftRow], _: Any = None) -> Any:
        nonlocal searches
        drafter.one_call = None
        expected = propose(rows)
        drafter.one_call = one_call
        found = propose(rows)
        assert found.read() == expected.read()
        assert [tree.ranks for tree in found.read()] == [tree.ranks for tree in expected.read()]
        for own, other in zip(found.read(), expected.read(), strict=True):
            # Scores of the two differ in the last bits.
            assert _values(own) == pytest.approx(_values(other), rel=1e-3, abs=1e-3)
        searches += bool(sum(found.sizes))
        return found

    monkeypatch.setattr(drafter, "propose", both)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, VOCAB, (5 + 9 * i,), generator=generator).tolist() for i in range(3)]
    llm.generate(prompts, PARAMS[params], use_tqdm=False)
    assert searches > 3


@pytest.mark.long
def test_unsupported_searches_run_in_python(world: World) -> None:
    """Logit edits and some edge scorers are no part of the call; the output is that of plain decoding all the same."""
    prompts = [list(range(5, 15)), list(range(3, 40))]
    params = [
        SamplingParams(temperature=1.0, seed=1, top_p=0.8, logit_bias={7: 1.0}, max_tokens=16, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=2, bad_words=["ab"], max_tokens=16, ignore_eos=True),
    ]
    outputs = []
    for draft in (None, "eagle3", *BLOCKS):
        folder = world.draft(draft) if draft else None
        llm = LLM(world.folder / "target", folder, dtype="float32", kernels="native", adaptive_drafts=False)
        outputs.append([output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
    assert all(output == outputs[0] for output in outputs)
