"""Promise 1: whatever drafts, however requests are batched, the output is that of the plain loop."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import LLM, DraftShape, SamplingParams, Speculation
from specdec.draft_heads.drafting.drafter import DraftRow
from specdec.kernels.types.tree import DraftTree
from specdec.verify.sampling import Sampling
from tests.coded_cache import KV_CACHE_DTYPES
from tests.fakes import RandomDrafter
from tests.new_groups import new_group
from tests.profiles import by_day, num_cases
from tests.specdec import oracle
from tests.specdec.drawn_requests import Arrival, KnowingDrafter, arrivals, cut, edited, run, shapes
from tests.specdec.output_checks import check, check_prompt, expect
from tests.specdec.world import BLOCKS, STORED, VOCAB, WINDOW, World
from tests.trees import chain_of

pytestmark = pytest.mark.slow

CASES = num_cases(100)


@pytest.mark.long
@settings(max_examples=CASES)
@given(
    cases=arrivals,
    shape=shapes,
    drafter=st.sampled_from(["none", "eagle", "eagle3", *BLOCKS, "llama", "random", "knowing", "knowing"]),
    seats=st.integers(1, 5),
    chunk=st.integers(5, 64),
    blocks=st.integers(20, 60),
    seed=st.integers(0, 1000),
    processed=st.booleans(),
    text=st.sampled_from([None, "ngram", "suffix"]),
    predicted=st.booleans(),
    attention=st.sampled_from(["plain", "sliding", "alibi"]),
    draft_window=st.sampled_from([None, None, 8, 12, 20]),
    kv_cache_dtype=st.sampled_from(["auto", *KV_CACHE_DTYPES]),
    draft_kv_cache_dtype=st.sampled_from([None, *KV_CACHE_DTYPES]),
    stored=st.sampled_from([None, None, None, *STORED]),
    updated=st.sampled_from([None, None, 1, 3, 6]),
)
def test_output_is_that_of_the_plain_loop(
    world: World,
    cases: list[Arrival],
    shape: DraftShape,
    drafter: str,
    seats: int,
    chunk: int,
    blocks: int,
    seed: int,
    processed: bool,
    text: str | None,
    predicted: bool,
    attention: str,
    draft_window: int | None,
    kv_cache_dtype: str,
    draft_kv_cache_dtype: str | None,
    stored: str | None,
    updated: int | None,
) -> None:
    if attention == "sliding":
        world, shape = world.sliding, replace(shape, nodes=min(shape.nodes, WINDOW))
    elif attention == "alibi":
        world = world.alibi
    elif stored is not None:
        world = world.stored(stored)
    world = world.with_cache(kv_cache_dtype)
    own = world.draft(drafter)
    sources = [*([str(own)] if own else []), *([text] if text else [])]
    llm = LLM(
        world.folder / "target",
        ",".join(sources) or None,
        dtype="float64",
        shape=shape,
        max_num_seqs=seats,
        max_num_batched_tokens=chunk,
        adaptive_drafts=False,
        prefill_stretch=0,
        max_model_len=64,
        kv_cache_memory=blocks * 8 * 3 * 2 * 16 * 8 * 2,
        kv_cache_dtype=kv_cache_dtype,
        draft_kv_cache_dtype=draft_kv_cache_dtype if own else None,
        block_size=8,
        draft_window_size=draft_window if own else None,
        logprobs_mode="processed_logprobs" if processed else "raw_logprobs",
        enable_lora=any(case.adapter for case in cases),
        max_loras=3,
        max_lora_rank=17,
    )

    cases = [case._replace(params=cut(case.params, chunk - seats)) for case in cases]
    beyond = 4 if drafter == "knowing" else 0
    planned = [new_group(llm, case.prompt, case.params) for case in cases]
    expected = [
        [expect(world.adapted(case.adapter), llm, request, case.params, beyond) for request in group.requests]
        for group, case in zip(planned, cases, strict=True)
    ]
    if predicted:
        params = [
            case.params if case.params.choices else replace(case.params, prediction=edited(all_of[0].tokens, seed))
            for case, all_of in zip(cases, expected, strict=True)
        ]
        cases = [case._replace(params=own) for case, own in zip(cases, params, strict=True)]
    if drafter == "random":
        llm.engine.worker.drafter = RandomDrafter(VOCAB, seed)
    if drafter == "knowing":
        futures = {
            (request.sampling.seed, request.sampling.sample_index): one.tokens + one.beyond
            for group, all_of in zip(planned, expected, strict=True)
            for request, one in zip(group.requests, all_of, strict=True)
        }
        llm.engine.worker.drafter = KnowingDrafter(seed, futures)
    has_head = drafter in ("eagle", "eagle3", *BLOCKS)
    updates = {updated: world.other(drafter)} if updated is not None and has_head else None
    # What was answered before is drafted the second time.
    for _ in range(2 if text == "suffix" else 1):
        for group, case, all_of in zip(run(llm, cases, updates, world), cases, expected, strict=True):
            output = group.output()
            for completion, one in zip(output.outputs, all_of, strict=True):
                check(completion, one, case.params)
            check_prompt(group, world.adapted(case.adapter), case.params)


@pytest.mark.parametrize("temperature", by_day([1.0, 0.0], 2, short=1))
def test_alone_and_in_a_batch_of_eight(world: World, temperature: float) -> None:
    """The heads' drafts, random drafts and none give the same tokens, alone and together."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 97, (3 + 7 * i,), generator=generator).tolist() for i in range(8)]
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=24, ignore_eos=True) for i in range(8)]
    results = []
    for drafter in ("none", "eagle", "eagle3", *BLOCKS, "llama", "random"):
        llm = LLM(
            world.folder / "target",
            world.draft(drafter),
            dtype="float64",
            shape=DraftShape(4, 4, 16),
            adaptive_drafts=False,
        )
        if drafter == "random":
            llm.engine.worker.drafter = RandomDrafter(97, 0)
        together = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        alone = [llm.generate([p], q)[0].token_ids for p, q in zip(prompts, params, strict=True)]
        assert together == alone
        results.append(together)
    assert all(result == results[0] for result in results)


MIXED = [
    Speculation(),
    Speculation(enabled=False),
    Speculation(max_nodes=1),
    Speculation(max_nodes=3, max_depth=2),
    Speculation(max_depth=1),
    Speculation(max_nodes=999, max_depth=999),
]


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("drafter", ["eagle", "dspark", "knowing"])
def test_speculation_of_each_request_changes_its_speed_alone(world: World, drafter: str, adaptive: bool) -> None:
    """Requests that differ in nothing else, in one batch."""
    prompt = list(range(5, 15))
    params = [
        SamplingParams(temperature=1.0, seed=11, max_tokens=33, ignore_eos=True, speculation=one) for one in MIXED
    ]
    known = oracle.generate(world.logits, prompt, params[0], Sampling(temperature=1.0, seed=11)).tokens
    shape = DraftShape(4, 3, 8)
    llm = LLM(world.folder / "target", world.draft(drafter), dtype="float64", shape=shape, adaptive_drafts=adaptive)
    if drafter == "knowing":
        llm.engine.worker.drafter = KnowingDrafter(0, {(11, 0): known})
    groups = run(llm, [Arrival(0, prompt, one) for one in params])
    assert [group.output().token_ids for group in groups] == [known] * len(MIXED)
    stats = [group.output().stats for group in groups]
    assert stats[1].steps == 32
    if not adaptive:
        # A bounded request has its drafts all the same.
        assert [one.drafted > 0 for one in stats] == [asked.enabled for asked in MIXED]
    if drafter == "knowing" and not adaptive:
        assert stats[0].steps < stats[4].steps < 32


def test_a_perfect_drafter_is_accepted_to_the_end(world: World) -> None:
    """Losslessness must not come from accepting nothing: right drafts are all accepted, up to the tree's depth."""
    prompt = list(range(5, 15))
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=41, ignore_eos=True)
    known = oracle.generate(world.logits, prompt, params, Sampling(temperature=1.0, seed=11)).tokens

    class Oracle(RandomDrafter):
        def tree(self, row: DraftRow) -> DraftTree:
            position = row.context.num_output
            return chain_of(known[position : position + min(4, row.max_depth)])

    llm = LLM(
        world.folder / "target",
        world.folder / "head",
        dtype="float64",
        shape=DraftShape(4, 1, 4),
        adaptive_drafts=False,
    )
    llm.engine.worker.drafter = Oracle(97, 0)
    output = llm.generate([prompt], params)[0]
    assert output.token_ids == known
    assert output.stats.steps == 8
    assert output.stats.tau == 5.0
    assert output.stats.accepted_per_depth == [8, 8, 8, 8]
    assert sum(output.outputs[0].accepted) == 32
