"""The engine with drafts from earlier requests."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from specdec import LLM, LoRARequest, SamplingParams, Speculation
from specdec.core.commands import Add
from specdec.core.outputs import SpeculationStats
from specdec.draft_heads.drafting.draft_shape import DraftShape
from tests.fakes import save_random_llama
from tests.lora_adapters import save_adapter

pytestmark = pytest.mark.slow

SHAPE = DraftShape(4, 3, 8)
PROMPT = list(range(5, 25))
# No token of its own text is likely to come again.
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, repetition_penalty=2.0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suffix")
    save_random_llama(folder)
    return folder


def load(target: Path, draft: str | None = "suffix", **settings: Any) -> LLM:
    return LLM(target, draft, **{"dtype": "float32", "shape": SHAPE, "adaptive_drafts": False, **settings})


@pytest.fixture
def llm(target: Path) -> Iterator[LLM]:
    with load(target) as llm:
        yield llm


def stats(llm: LLM, client: str = "", **more: Any) -> SpeculationStats:
    add = llm.request_maker.add(PROMPT, GREEDY, cache_salt=more.get("cache_salt"))
    add.client, add.adapter = client, more.get("adapter")
    group = llm.engine.handle(add)
    while not group.finished:
        llm.engine.step()
    return group.output().stats


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_tokens_are_those_of_plain_decoding(target: Path, temperature: float, dtype: str) -> None:
    """The batches have forks and chunked prompts, and come twice; the store gives up texts meanwhile."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 40, (10 + 8 * i,), generator=generator).tolist() for i in range(4)]
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=60, ignore_eos=True, n=2 if temperature else 1)
    results = []
    for draft in (None, "suffix"):
        own = {"dtype": dtype, "max_num_seqs": 8, "max_num_batched_tokens": 24, "draft_store_tokens": 1024}
        with load(target, draft, **own) as llm:
            runs = [llm.generate(prompts, params, use_tqdm=False) for _ in range(4)]
            results.append([[one.token_ids for one in output.outputs] for run in runs for output in run])
            if draft:
                first, *_, last = ([output.stats.tau for output in run] for run in runs)
                assert sum(last) > sum(first) + 4
    assert results[0] == results[1]


def test_what_was_answered_before_is_drafted(llm: LLM) -> None:
    assert stats(llm).tau < 1.5
    again = stats(llm)
    assert again.tau > 4
    assert again.steps < 30 / 4


def test_two_salts_never_share_a_match(llm: LLM) -> None:
    first = stats(llm, cache_salt="a")
    for salt in ("b", None, "A", "aa"):
        assert stats(llm, cache_salt=salt) == first
    assert stats(llm, cache_salt="a").tau > 4


def test_two_api_keys_share_where_the_operator_says_so(llm: LLM, target: Path) -> None:
    first = stats(llm, "key 1")
    assert stats(llm, "key 2") == stats(llm, "") == first
    assert stats(llm, "key 1").tau > 4
    with load(target, draft_store_shared=True) as shared:
        assert stats(shared, "key 1") == first
        assert stats(shared, "key 2").tau > 4
        # A salt separates them all the same.
        assert stats(shared, "key 2", cache_salt="a") == first


def test_two_adapters_share_nothing(target: Path, tmp_path: Path) -> None:
    """Two whose tokens are the target's: they add nothing."""
    adapters = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        save_adapter(folder, LlamaForCausalLM.from_pretrained(target), seed=number, size=0.0)
        adapters.append(LoRARequest(f"adapter {number}", number, str(folder)))
    with load(target, enable_lora=True) as llm:
        first = stats(llm)
        for adapter in adapters:
            assert stats(llm, adapter=adapter) == first
            assert stats(llm, adapter=adapter).tau > 4


def test_each_engine_has_its_own_store(llm: LLM, target: Path) -> None:
    first = stats(llm)
    with load(target) as other:
        assert stats(other) == first


def test_a_request_that_is_aborted_leaves_what_it_had(llm: LLM) -> None:
    add = Add(PROMPT, GREEDY)
    group = llm.engine.handle(add)
    for _ in range(20):
        llm.engine.step()
    for request in group.requests:
        llm.engine.scheduler.abort(request)
    assert 2 < stats(llm).tau < 5


def test_plain_requests_are_stored_too(llm: LLM) -> None:
    llm.generate([PROMPT], replace(GREEDY, speculation=Speculation(enabled=False)), use_tqdm=False)
    assert stats(llm).tau > 4
