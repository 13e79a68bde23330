"""Requests of many windows' length in a cache of three, whose memory is NaN where nothing was written."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import LLM, DraftShape, SamplingParams
from specdec.core.request import RequestGroup
from specdec.kernels.native.library import library_file
from specdec.scheduling.integrity import check_scheduler
from specdec.verify.sampling import Sampling
from tests.new_groups import new_group
from tests.profiles import by_day
from tests.specdec import oracle
from tests.specdec.kv_transfer.engines import disk
from tests.specdec.world import VOCAB, WINDOW, World

BLOCK, DRAFT_WINDOW = 8, 9
# Tokens in all: 20 windows.
LENGTH = 20 * WINDOW
PROMPT = torch.randint(3, VOCAB, (8 * WINDOW,), generator=torch.Generator().manual_seed(2)).tolist()


def load(world: World, drafter: str, blocks: int, **settings: Any) -> LLM:
    """An engine with this many blocks, whose null block is NaN."""
    settings = {
        "dtype": "float64",
        "shape": DraftShape(3, 2, 6),
        "adaptive_drafts": False,
        "prefill_stretch": 0,
        "max_num_batched_tokens": 24,
        "max_num_seqs": 2,
        "block_size": BLOCK,
        "draft_window_size": DRAFT_WINDOW if drafter != "none" else None,
        **settings,
    }
    # How large a block is, only an engine knows.
    with LLM(world.folder / "target", world.draft(drafter), kv_cache_memory=1 << 20, **settings) as other:
        size = sum(part[0].numel() * part.element_size() for part in other.engine.worker.cache.parts.values())
    llm = LLM(world.folder / "target", world.draft(drafter), kv_cache_memory=blocks * size, **settings)
    for part in llm.engine.worker.cache.parts.values():
        part[llm.engine.worker.cache.null_block] = float("nan")
    return llm


@cache
def expected(world: World, temperature: float, length: int = LENGTH) -> list[int]:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=length - len(PROMPT), ignore_eos=True)
    return oracle.generate(world.logits, PROMPT, params, Sampling(temperature=temperature, seed=3)).tokens


def run(llm: LLM, *groups: RequestGroup) -> int:
    """Run requests to their end; return the most blocks that were held after a step."""
    most, pool = 0, llm.engine.scheduler.manager.pool
    for group in groups:
        for request in group.requests:
            llm.engine.scheduler.add(request)
    while not all(group.finished for group in groups):
        llm.engine.step()
        check_scheduler(llm.engine.scheduler)
        most = max(most, pool.num_blocks - pool.num_free)
    assert pool.num_free == pool.num_blocks
    return most


@pytest.mark.long
@pytest.mark.parametrize(
    ("temperature", "drafter"),
    by_day(
        [
            *((0.0, "none"), (1.0, "eagle"), (0.0, "eagle3"), (1.0, "dspark"), (0.0, "llama")),
            *((1.0, "none"), (0.0, "eagle"), (1.0, "eagle3"), (0.0, "dspark"), (1.0, "llama")),
        ],
        5,
    ),
)
def test_a_request_of_twenty_windows_runs_in_three(world: World, drafter: str, temperature: float) -> None:
    # A block head's rows see their block besides.
    blocks = 3 * WINDOW // BLOCK + (2 if drafter == "dspark" else 1)
    llm = load(world.sliding, drafter, blocks)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=LENGTH - len(PROMPT), ignore_eos=True)
    group = new_group(llm, PROMPT, params)
    most = run(llm, group)
    output = group.output()
    assert output.token_ids == expected(world.sliding, temperature)
    assert most <= blocks < LENGTH // BLOCK
    if drafter != "none":
        # It drafts to the end.
        assert output.stats.drafted > 2 * output.stats.steps


@pytest.mark.long
@pytest.mark.skipif(library_file() is None, reason="the native kernels are not built here")
def test_the_compiled_pass_and_search_read_no_block_that_was_given_back(world: World) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH - len(PROMPT), ignore_eos=True)
    outputs = []
    for drafter in ("none", "eagle", "dspark"):
        llm = load(world.sliding, drafter, 6, dtype="float32", kernels="native")
        group = new_group(llm, PROMPT, params)
        run(llm, group)
        outputs.append(group.output().token_ids)
    assert outputs == [expected(world.sliding, 0.0)] * 3


@pytest.mark.long
def test_samples_and_preempted_requests_share_what_is_left(world: World) -> None:
    """Two samples of a prompt and another request, of which only some have room at once."""
    llm = load(world.sliding, "eagle", 9)
    params = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=40, ignore_eos=True)
    first = new_group(llm, PROMPT, params)
    second = new_group(llm, PROMPT[:50], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    run(llm, first, second)
    for sample, completion in enumerate(first.output().outputs):
        sampling = Sampling(temperature=1.0, seed=3, sample_index=sample)
        assert completion.token_ids == oracle.generate(world.sliding.logits, PROMPT, params, sampling).tokens
    plain = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    wanted = oracle.generate(world.sliding.logits, PROMPT[:50], plain, Sampling(temperature=0.0)).tokens
    assert second.output().token_ids == wanted


def test_a_cached_prefix_is_used_though_its_beginning_is_gone(world: World) -> None:
    llm = load(world.sliding, "eagle", 6)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    run(llm, new_group(llm, PROMPT, params))
    again = new_group(llm, PROMPT, params)
    run(llm, again)
    assert again.output().num_cached_tokens == len(PROMPT) - 1
    assert again.output().token_ids == expected(world.sliding, 0.0)[:8]


def test_a_restart_loads_the_last_window_alone(world: World, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    outputs = []
    for _ in range(2):
        with load(world.sliding, "eagle", 6, kv_transfer_config=disk(tmp_path)) as llm:
            outputs += llm.generate([PROMPT], params, use_tqdm=False)
            num_loaded = llm.engine.connector._num_begun
    assert outputs[0].token_ids == outputs[1].token_ids == expected(world.sliding, 0.0)[:8]
    assert outputs[1].num_cached_tokens == len(PROMPT) - 1
    assert num_loaded == -(-WINDOW // BLOCK)
    assert outputs[0].stats.tau == outputs[1].stats.tau


@pytest.mark.long
def test_a_model_with_a_layer_that_sees_all_keeps_every_block(world: World) -> None:
    """Its own, or the head's."""
    group_of = SamplingParams(temperature=0.0, max_tokens=LENGTH - len(PROMPT), ignore_eos=True)
    for one, drafter, window in ((world, "eagle", DRAFT_WINDOW), (world.sliding, "eagle", None)):
        llm = load(one, drafter, 64, draft_window_size=window)
        assert run(llm, new_group(llm, PROMPT, group_of)) >= LENGTH // BLOCK


def test_trees_are_no_larger_than_the_window(world: World) -> None:
    """By default; a size that is given is refused."""
    folder = world.sliding.folder / "target"
    settings: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": 1 << 20}
    assert LLM(folder, "ngram", **settings).config.shape.nodes == WINDOW
    assert LLM(folder, "ngram", shape={"nodes": 5}, **settings).config.shape.nodes == 5
    with pytest.raises(ValueError, match=f"draft_nodes 13 is more than the target's sliding window of {WINDOW} tokens"):
        LLM(folder, "ngram", shape={"nodes": 13}, **settings)
    with pytest.raises(ValueError, match="sliding window of 2 tokens is narrower than its drafts of 6; raise draft_wi"):
        LLM(folder, world.draft("eagle3"), draft_window_size=2, **settings)
