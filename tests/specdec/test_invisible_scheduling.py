"""Promise 1 under pressure: tiny caches, preemption of both kinds, shared prefixes, priorities, aborts.

Every output is that of its request run alone by the plain loop, whatever the scheduler does to it.
"""

import contextlib
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import LLM, DraftShape, SamplingParams
from specdec.core.request import Request, RequestGroup
from specdec.draft_heads.drafting.drafter import Drafter, DraftRow
from specdec.kernels.types.draft_trees import DraftTrees
from specdec.kernels.types.kv_entries import KV_DTYPES, slot_bytes
from specdec.kernels.types.upload import Packet
from specdec.scheduling.integrity import check_scheduler
from tests.coded_cache import KV_CACHE_DTYPES
from tests.fakes import RandomDrafter
from tests.new_groups import new_group
from tests.profiles import num_cases
from tests.specdec.drawn_requests import KnowingDrafter, adapters, cut, requests
from tests.specdec.oracle import Expected
from tests.specdec.output_checks import check, check_prompt, expect
from tests.specdec.world import BLOCKS, EOS, SCALED, VOCAB, World

pytestmark = pytest.mark.slow

CASES = num_cases(40)
CONTEXT = 64
# One block of eight entries: two layers of the target, one of the draft head, and a feature of 32, in float64.
BLOCK_BYTES = 8 * (3 * 2 * 16 + 32) * 8


def block_bytes(block_size: int, drafter: str, kv_cache_dtype: str, draft_kv_cache_dtype: str, scaled: bool) -> int:
    """Bytes of a block: a Llama reads no features, and a block head here has two layers."""
    slot = {name: slot_bytes(4, 8, KV_DTYPES.get(name, torch.float64)) for name in KV_CACHE_DTYPES}
    layers = {"none": 0, **dict.fromkeys(BLOCKS, 2)}.get(drafter, 1)
    features = 0 if drafter in ("none", "llama") else 32 * 8
    own = 4 * 8 if scaled and kv_cache_dtype in ("auto", "int8") else slot[kv_cache_dtype]
    return block_size * (2 * own + layers * slot[draft_kv_cache_dtype] + features)


class Arrival(NamedTuple):
    """A request, and what happens to it.

    Attributes:
        stem, shared: its prompt begins with so many tokens of that stem,
        own: and goes on with these.
        aborted: the step before or in which it is aborted, if at all.
        within: whether in the middle of that step.
    """

    step: int
    stem: int
    shared: int
    own: list[int]
    params: SamplingParams
    priority: int
    salt: str | None
    aborted: int | None
    within: bool
    adapter: int

    @property
    def prompt(self) -> list[int]:
        stem = random.Random(self.stem)
        return [stem.randrange(3, VOCAB) for _ in range(self.shared)] + self.own


arrivals = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 12),
        stem=st.integers(0, 1),
        shared=st.sampled_from([0, 7, 8, 15, 16, 17, 24, 31, 32]),
        own=st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=9),
        params=requests,
        priority=st.integers(-1, 1),
        salt=st.sampled_from([None, None, None, "salt"]),
        aborted=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 30)),
        within=st.booleans(),
        adapter=adapters,
    ),
    min_size=2,
    max_size=7,
)


class Interrupting:
    """A drafter in whose middle something happens."""

    def __init__(self, drafter: Drafter, within: list[Request]) -> None:
        self.drafter, self.within, self.prepare_ahead = drafter, within, drafter.prepare_ahead
        self.llm: LLM | None = None

    def propose(self, rows: Sequence[DraftRow], packet: Packet | None = None) -> DraftTrees:
        trees = self.drafter.propose(rows, packet)
        assert self.llm is not None
        while self.within:
            self.llm.engine.scheduler.abort(self.within.pop())
        return trees


def run(llm: LLM, cases: list[Arrival], groups: list[RequestGroup]) -> None:
    """All to their end, with integrity checked after every step."""
    engine = llm.engine
    assert isinstance(engine.worker.drafter, Interrupting)
    engine.worker.drafter.llm = llm
    step = 0
    while step <= max(case.step for case in cases) or engine.has_unfinished:
        for case, group in zip(cases, groups, strict=True):
            if case.step == step:
                for request in group.requests:
                    engine.scheduler.add(request)
            if case.aborted is not None and case.step + case.aborted == step:
                if case.within:
                    engine.worker.drafter.within += group.requests
                else:
                    for request in group.requests:
                        engine.scheduler.abort(request)
        engine.step()
        check_scheduler(engine.scheduler)
        step += 1
        assert step < 3000, "the requests do not come to an end"


@pytest.fixture(scope="module")
def kv_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.mark.long
@settings(max_examples=CASES)
@given(
    cases=arrivals,
    shape=st.builds(DraftShape, depth=st.integers(1, 4), branching=st.integers(1, 4), nodes=st.integers(1, 20)),
    drafter=st.sampled_from(["none", "eagle", "eagle3", *BLOCKS, "llama", "random", "knowing"]),
    seats=st.integers(1, 6),
    budget=st.integers(6, 64),
    threshold=st.sampled_from([0, 0, 1, 5, 16]),
    partial=st.integers(1, 3),
    block_size=st.sampled_from([8, 24]),
    blocks=st.integers(0, 12),
    host_blocks=st.integers(1, 12),
    watermark=st.sampled_from([0.0, 0.2]),
    caching=st.sampled_from([True, True, True, False]),
    connector=st.sampled_from([None, None, "host", "disk", "prefill", "decode"]),
    # Fitted to measured costs, a case is never quite the same again; its output is.
    stretch=st.sampled_from([0.0, 0.0, 1.01, 2.0]),
    adaptive=st.sampled_from([False, False, True]),
    kv_cache_dtype=st.sampled_from(KV_CACHE_DTYPES),
    draft_kv_cache_dtype=st.sampled_from(KV_CACHE_DTYPES),
    scaled=st.booleans(),
    ahead=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_output_is_that_of_the_request_alone(
    world: World,
    kv_folder: Path,
    cases: list[Arrival],
    shape: DraftShape,
    drafter: str,
    seats: int,
    budget: int,
    threshold: int,
    partial: int,
    block_size: int,
    blocks: int,
    host_blocks: int,
    watermark: float,
    caching: bool,
    connector: str | None,
    stretch: float,
    adaptive: bool,
    kv_cache_dtype: str,
    draft_kv_cache_dtype: str,
    scaled: bool,
    ahead: bool,
    seed: int,
) -> None:
    world = (world.stored(SCALED) if scaled else world).with_cache(kv_cache_dtype)
    cases = [case._replace(params=cut(case.params, max(0, budget - seats))) for case in cases]
    # Enough for one request at its longest, and not much more.
    num_blocks = -(-CONTEXT // block_size) + blocks // (block_size // 8)
    per_block = block_bytes(block_size, drafter, kv_cache_dtype, draft_kv_cache_dtype, scaled)
    kv_transfer_config = None
    if connector is not None and caching:
        # The disk outlives the engines of all cases.
        disks = [] if connector == "host" else [{"type": "fs", "root_dir": str(kv_folder), "max_bytes": 200_000}]
        extra = {"cpu_bytes_to_use": (host_blocks + 2) * per_block, "secondary_tiers": disks}
        kv_transfer_config = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    llm = LLM(
        world.folder / "target",
        world.draft(drafter),
        dtype="float64",
        shape=shape,
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=threshold,
        max_num_partial_prefills=partial,
        scheduling_policy="priority",
        watermark=watermark,
        prefill_stretch=stretch,
        adaptive_drafts=adaptive,
        max_model_len=CONTEXT,
        kv_cache_memory=num_blocks * per_block,
        kv_cache_dtype=kv_cache_dtype,
        draft_kv_cache_dtype=None if drafter == "none" else draft_kv_cache_dtype,
        block_size=block_size,
        enable_prefix_caching=caching,
        kv_transfer_config=kv_transfer_config,
        role=connector if connector in ("prefill", "decode") and caching else "both",
        enable_lora=any(case.adapter for case in cases),
        max_lora_rank=17,
    )
    # As on a GPU: the pass of a plain step is launched behind the step before.
    llm.engine.scheduler._passes_ahead = ahead and connector is None
    manager = llm.engine.scheduler.manager
    groups = [
        new_group(
            llm,
            case.prompt,
            case.params,
            priority=case.priority,
            cache_salt=case.salt,
            lora_request=world.adapter(case.adapter, llm.config.draft),
        )
        for case in cases
    ]
    beyond = 4 if drafter == "knowing" else 0
    expected = [
        [expect(world.adapted(case.adapter), llm, request, case.params, beyond) for request in group.requests]
        for group, case in zip(groups, cases, strict=True)
    ]
    inner: Drafter = llm.engine.worker.drafter
    if drafter == "random":
        inner = RandomDrafter(VOCAB, seed)
    if drafter == "knowing":
        inner = KnowingDrafter(seed, futures(groups, expected))
    llm.engine.worker.drafter = Interrupting(inner, [])
    run(llm, cases, groups)
    for group, case, all_of in zip(groups, cases, expected, strict=True):
        aborted = False
        for completion, one in zip(group.output().outputs, all_of, strict=True):
            if completion.finish_reason == "abort":
                assert case.aborted is not None
                assert completion.token_ids == one.tokens[: len(completion.token_ids)]
                aborted = True
            else:
                check(completion, one, case.params)
        if not aborted:
            check_prompt(group, world.adapted(case.adapter), case.params)
    assert manager.pool.num_free == manager.pool.num_blocks
    stats = llm.engine.scheduler.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.queued == stats.finished + stats.aborted == sum(len(group.requests) for group in groups)
    llm.close()


def futures(groups: list[RequestGroup], expected: list[list[Expected]]) -> dict[tuple[int, int], list[int]]:
    """Return the tokens that each sample will generate."""
    return {
        (request.sampling.seed, request.sampling.sample_index): one.tokens + one.beyond
        for group, all_of in zip(groups, expected, strict=True)
        for request, one in zip(group.requests, all_of, strict=True)
    }


def test_the_cases_do_preempt_hit_and_draft(world: World) -> None:
    """Or the test above would show nothing."""
    llm = LLM(
        world.folder / "target",
        world.folder / "head",
        dtype="float64",
        shape=DraftShape(3, 3, 8),
        adaptive_drafts=False,
        max_model_len=CONTEXT,
        max_num_seqs=6,
        max_num_batched_tokens=40,
        kv_cache_memory=14 * BLOCK_BYTES,
        block_size=8,
    )
    params = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=30, stop_token_ids=[EOS], ignore_eos=True)
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14 + i] for i in range(4)]
    llm.generate(prompts, params, use_tqdm=False)
    stats = llm.engine.scheduler.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hits > 0
    assert stats.drafts_asked > stats.drafts_granted > stats.drafts_verified > 0


def test_a_step_that_comes_to_nothing_leaves_no_trace(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is interrupted after verification; repeating it yields the same tokens and log-probabilities."""
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=20, logprobs=1, ignore_eos=True)
    llm = LLM(
        world.folder / "target",
        world.folder / "head",
        dtype="float64",
        shape=DraftShape(3, 3, 8),
        adaptive_drafts=False,
    )
    (expected,) = llm.generate([[3, 4, 5, 6]], params)
    append, calls = llm.engine._append, itertools.count()

    def interrupted(*args: Any) -> Any:
        if next(calls) % 3 == 1:
            raise KeyboardInterrupt
        return append(*args)

    monkeypatch.setattr(llm.engine, "_append", interrupted)
    (request,) = new_group(llm, [3, 4, 5, 6], params).requests
    llm.engine.scheduler.add(request)
    while not request.finished:
        with contextlib.suppress(KeyboardInterrupt):
            llm.engine.step()
        check_scheduler(llm.engine.scheduler)
    assert request.completion().token_ids == expected.token_ids
    assert request.completion().cumulative_logprob == pytest.approx(expected.outputs[0].cumulative_logprob, abs=1e-9)
