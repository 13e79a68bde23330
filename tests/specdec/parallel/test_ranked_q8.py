"""`quantization="q8"` over several ranks: each rounds its part, and the weights are those of one rank."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specdec import LLM, SamplingParams
from specdec.kernels.native.library import library_file
from tests.fakes import save_random_block, save_random_eagle3, save_random_head, save_random_llama, save_shallow_llama
from tests.specdec.parallel.ranked_engine import PROMPTS, engine, prompt_logits
from tests.specdec.world import World

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(library_file() is None, reason="the native kernels are not built here"),
]
Q8: dict[str, Any] = {"dtype": "float32", "kernels": "native", "quantization": "q8"}
# A rank's part has whole groups of 32 inputs.
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
PARAMS = [SamplingParams(temperature=float(i % 2), seed=i, max_tokens=16, ignore_eos=True) for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def wide(world: World, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("wide")
    target = save_random_llama(folder / "target", **SIZES)
    save_random_head(folder / "head", **{**SIZES, "intermediate_size": 48})
    save_random_eagle3(folder / "head3", **SIZES)
    save_random_block(folder / "dspark", "dspark", **SIZES)
    save_shallow_llama(folder / "small", target)
    return World(folder, target, world.tokenizer)


def outcome(llm: LLM) -> tuple[list[list[int]], dict[int, int]]:
    """Return the tokens, and how many draft trees had how many of theirs accepted."""
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [list(output.token_ids) for output in outputs], llm.stats().trees_by_accepted


@pytest.mark.long
@pytest.mark.parametrize(
    ("drafter", "settings"),
    [
        ("none", {}),
        ("eagle3", {}),
        ("eagle3", {"pipeline_parallel_size": 2}),
        *((drafter, {"draft_tensor_parallel_size": 2}) for drafter in ("eagle3", "dspark", "llama")),
    ],
)
def test_tokens_and_accepted_drafts_are_those_of_one_rank(
    wide: World, drafter: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(wide, drafter, **Q8) as one:
        expected, logits = outcome(one), prompt_logits(one, monkeypatch)
    with engine(wide, drafter, 2, **Q8, **settings) as llm:
        assert outcome(llm) == expected
        assert (prompt_logits(llm, monkeypatch) - logits).abs().max() < 1e-4
    if drafter == "none":
        with engine(wide, drafter, dtype="float32") as unrounded:
            assert (prompt_logits(unrounded, monkeypatch) - logits).abs().max() > 1e-2
    else:
        assert any(accepted and trees for accepted, trees in expected[1].items())


def matrices() -> list[Tensor]:
    gc.collect()
    found = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter)]
    # Weights here have 32 rows at least, and their columns; the caches of features have more rows.
    return [one for one in found if one.dtype == torch.float32 and one.dim() == 2 and 32 <= len(one) <= 260]


@pytest.mark.parametrize("size", [1, 2])
def test_no_rank_keeps_a_weight_beside_its_packed_form(wide: World, size: int) -> None:
    """A rank has the embeddings of target and small model as they are, whole or its part."""
    before = {id(one) for one in matrices()}
    with engine(wide, "llama", 2, draft_tensor_parallel_size=size, **Q8) as llm:
        found = [one for one in matrices() if id(one) not in before]
        assert {len(one) for one in found} <= {48, len(llm.model.embed_tokens.weight), *([97] if size == 1 else [])}
        # Two ranks with two models each.
        assert len({one.untyped_storage().data_ptr() for one in found}) <= 4


@pytest.mark.long
def test_a_group_that_two_ranks_would_share_is_refused(world: World, wide: World) -> None:
    """The scale of such a group would not be one rank's."""
    reason = (
        "tensor_parallel_size is 2, and a rank has 16 of the 32 inputs of o_proj, which quantization 'q8' rounds in "
        "groups of 32; lower it until 32 divides a rank's part, or use quantization 'none'"
    )
    with pytest.raises(ValueError, match=f"^{reason}$"):
        engine(world, "none", 2, **Q8).__enter__()
    reason = r"head: .* a rank has 24 of the 48 inputs of down_proj, .*; draft_tensor_parallel_size 1 leaves the draft"
    with pytest.raises(ValueError, match=reason):
        engine(wide, "eagle", 2, draft_tensor_parallel_size=2, **Q8).__enter__()
    with engine(wide, "eagle", 2, **Q8) as llm:
        assert outcome(llm)[0]
