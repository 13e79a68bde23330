"""Scores in float64 where weights and cache entries have few bits, and prompts repeat one token."""

from typing import Any

import pytest

from specdec import LLM, SamplingParams
from tests.specdec.drawn_requests import Arrival, run
from tests.specdec.output_checks import assert_close, check_choices
from tests.specdec.world import World

SETTINGS: dict[str, Any] = {"dtype": "float64", "max_model_len": 64, "kv_cache_memory": 1 << 20, "block_size": 8}
PROMPTS = [[30, 30], [14, 14], [51, 51, 51], [77] * 9]


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("stored", ["fp8-channels", "int8", "awq", "packed-4"])
def test_scores_are_transformers_but_for_a_rounding_that_chance_decides(
    world: World, stored: str, kv_cache_dtype: Any
) -> None:
    """Half way between two numbers of float32, to which both round in each norm. All other digits are the same."""
    own = world.stored(stored).with_cache(kv_cache_dtype)
    llm = LLM(own.folder / "target", kv_cache_dtype=kv_cache_dtype, adaptive_drafts=False, **SETTINGS)
    for prompt in PROMPTS:
        params = SamplingParams(choices=[[2, 2], [prompt[0], 2], [5, 6, 7]])
        (group,) = run(llm, [Arrival(0, prompt, params)])
        check_choices(group, own)
        # However the tokens are laid out in a pass, this engine rounds alike.
        for score in group.output().choices or []:
            (alone,) = llm.generate([prompt], SamplingParams(choices=[score.token_ids]), use_tqdm=False)
            assert alone.choices is not None
            assert alone.choices[0].logprobs == pytest.approx(score.logprobs, abs=1e-12)


def test_only_numbers_half_way_between_two_of_float32_round_either_way(world: World) -> None:
    stored = world.stored("fp8-channels").with_cache("int8")
    assert stored.rounds_either_way([30, 30, 2])
    assert not world.rounds_either_way([30, 30, 2])
    with pytest.raises(AssertionError, match="is not 1"):
        assert_close(1 + 1e-7, 1, lambda: False)
    with pytest.raises(AssertionError):
        assert_close(1 + 1e-5, 1, lambda: True)
    assert_close(1 + 1e-7, 1, lambda: True)
