"""Requests with adapters: tokens of the merged weights, prefixes, places, and what is refused."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import LLM, BeamSearchParams, CheckpointError, LoRARequest, QueueFullError, SamplingParams
from specdec.core.request import Request
from specdec.kernels.native.adapters import NativeAdapters
from specdec.kernels.native.library import library_file
from specdec.verify.sampling import Sampling
from tests.lora_adapters import merged, request_for, save_adapter
from tests.new_groups import new_group
from tests.specdec import oracle
from tests.specdec.adapted_engine import GREEDY, engine, prompts
from tests.specdec.world import BLOCKS, World


def expected(world: World, number: int, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    sampling = Sampling(temperature=params.temperature, seed=params.seed or 0)
    return oracle.generate(world.adapted(number).logits, prompt, params, sampling).tokens


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", ["none", "eagle", "eagle3", *BLOCKS, "llama"])
def test_tokens_are_those_of_the_merged_weights(world: World, draft: str, temperature: float) -> None:
    """Two adapters and none in one batch, prompts in chunks, with every kind of head."""
    numbers = [1, 0, 2, 1]
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=20, ignore_eos=True) for i in range(len(numbers))
    ]
    llm = engine(world, draft, max_num_seqs=4, max_num_batched_tokens=37, prefill_stretch=0)
    given = [world.adapter(number) for number in numbers]
    outputs = llm.generate(prompts(4), params, lora_request=given, use_tqdm=False)
    wanted = [expected(world, *each) for each in zip(numbers, prompts(4), params, strict=True)]
    assert [output.token_ids for output in outputs] == wanted
    if draft != "none":
        assert all(output.stats.drafted for output in outputs)


@pytest.mark.skipif(library_file() is None, reason="the native kernels are not built here")
@pytest.mark.parametrize("quantization", ["none", "q8"])
def test_native_logits_are_those_of_the_merged_weights(world: World, tmp_path: Path, quantization: str) -> None:
    """Within float32's rounding; 8-bit weights have the adapter unrounded beside them."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    found = []
    for number in (1, 2):
        target = tmp_path / f"{quantization}-{number}"
        merged(world.target, world.adapters[number - 1]).save_pretrained(target)
        whole = LLM(target, None, dtype="float32", kernels="native")
        own = engine(world, dtype="float32", kernels="native", quantization=quantization)
        (plain,) = whole.generate(prompts(1), params, use_tqdm=False)
        (output,) = own.generate(prompts(1), params, lora_request=world.adapter(number), use_tqdm=False)
        entries = [each.outputs[0].logprobs[0] for each in (plain, output)]  # type: ignore[index]
        assert next(iter(entries[0])) == next(iter(entries[1]))
        both = entries[0].keys() & entries[1].keys()
        assert len(both) >= 4
        found += [abs(entries[0][token].logprob - entries[1][token].logprob) for token in both]
    assert max(found) < (1e-4 if quantization == "none" else 0.3)


@pytest.mark.long
def test_prefixes_are_shared_within_an_adapter_alone(world: World) -> None:
    (prompt,) = prompts(1, 60)
    llm = engine(world, "eagle", block_size=8)
    hits = []
    for number in (1, 1, 2, 2, 0, 0, 1):
        (output,) = llm.generate([prompt], GREEDY, lora_request=world.adapter(number), use_tqdm=False)
        hits.append(output.num_cached_tokens)
        assert output.token_ids == expected(world, number, prompt, GREEDY)
    assert hits[0] == hits[2] == hits[4] == 0
    assert hits[1] == hits[3] == hits[5] == hits[6] > 40


def test_another_adapter_under_the_same_name_and_path_finds_no_old_block(world: World, tmp_path: Path) -> None:
    (prompt,) = prompts(1, 60)
    llm = engine(world, block_size=8)
    outputs = []
    for seed in (1, 2):
        save_adapter(tmp_path / "same", world.target, seed=seed)
        (output,) = llm.generate([prompt], GREEDY, lora_request=request_for(tmp_path / "same", 1), use_tqdm=False)
        outputs.append(output)
        assert llm.remove_lora(1)
    assert [output.num_cached_tokens for output in outputs] == [0, 0]
    assert outputs[0].token_ids != outputs[1].token_ids


def test_a_salt_cannot_name_an_adapter(world: World) -> None:
    llm = engine(world)
    (own,) = new_group(llm, [3, 4], GREEDY, lora_request=world.adapter(1)).requests
    assert own.cache_salt is not None
    with pytest.raises(ValueError, match="cache_salt is not valid text"):
        new_group(llm, [3, 4], GREEDY, cache_salt=own.cache_salt)


@pytest.mark.skipif(library_file() is None, reason="the native kernels are not built here")
def test_rows_of_one_adapter_are_multiplied_together(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """And outputs come back in the order of the prompts."""
    counts, spans = list[int](), NativeAdapters.spans
    llm = engine(world, "eagle", dtype="float32", kernels="native")

    def counted(*args: Any) -> Any:
        found = spans(*args)
        counts.append(len(found) // 3)
        return found

    monkeypatch.setattr(NativeAdapters, "spans", counted)
    given = [world.adapter(number) for number in (1, 0, 2, 0, 1, 2)]
    outputs = llm.generate(prompts(6), GREEDY, lora_request=given, use_tqdm=False)
    assert set(counts) == {2}
    alone = [
        llm.generate([prompt], GREEDY, lora_request=adapter, use_tqdm=False)[0].token_ids
        for prompt, adapter in zip(prompts(6), given, strict=True)
    ]
    assert [output.token_ids for output in outputs] == alone


@pytest.mark.long
def test_samples_and_beams_have_the_adapter(world: World) -> None:
    (prompt,) = prompts(1)
    sampled = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    beams = BeamSearchParams(beam_width=3, max_tokens=6)
    found, wanted = [], []
    plain = engine(world)
    for number in (1, 2):
        (output,) = plain.generate([prompt], sampled, lora_request=world.adapter(number), use_tqdm=False)
        for index, completion in enumerate(output.outputs):
            sampling = Sampling(temperature=1.0, seed=5, sample_index=index)
            own = oracle.generate(world.adapted(number).logits, prompt, sampled, sampling)
            assert completion.token_ids == own.tokens
        (search,) = plain.beam_search([prompt], beams, lora_request=world.adapter(number))
        theirs = world.adapted(number).target.generate(
            torch.tensor([prompt]), num_beams=3, max_new_tokens=6, do_sample=False, pad_token_id=0
        )
        found.append(search.sequences[0].tokens)
        wanted.append(theirs[0].tolist())
    assert found == wanted
    assert found[0] != found[1]


@pytest.fixture
def three(world: World, tmp_path: Path) -> tuple[LLM, list[LoRARequest]]:
    """An engine with room for two adapters, and three adapters."""
    folders = [save_adapter(tmp_path / f"a{seed}", world.target, seed=seed) for seed in range(3)]
    return engine(world, max_loras=2), [request_for(folder, i + 1) for i, folder in enumerate(folders)]


@pytest.mark.long
def test_the_least_recently_used_adapter_makes_way(three: tuple[LLM, list[LoRARequest]]) -> None:
    llm, given = three
    results = [llm.generate([[5, 6]], GREEDY, lora_request=each, use_tqdm=False)[0].token_ids for each in given[:2]]
    llm.add_lora(given[0])
    assert llm.list_loras() == [given[1], given[0]]
    llm.add_lora(given[2])
    assert llm.list_loras() == [given[0], given[2]]
    for number in (2, 1, 0, 1):
        (output,) = llm.generate([[5, 6]], GREEDY, lora_request=given[number], use_tqdm=False)
        results.append(output.token_ids)
    assert results[3] == results[5] == results[1]
    assert results[4] == results[0]
    assert len({tuple(result) for result in results}) == 3


def step_until_ended(llm: LLM, requests: Sequence[Request]) -> None:
    while not all(request.finished for request in requests):
        llm.engine.step()


@pytest.mark.long
def test_an_adapter_in_use_stays(three: tuple[LLM, list[LoRARequest]]) -> None:
    """It is not replaced while a request has it: one that is queued, or one that nobody has queued yet."""
    llm, given = three
    alone = [llm.generate([[5, 6]], GREEDY, lora_request=each, use_tqdm=False)[0].token_ids for each in given[:2]]
    groups = [new_group(llm, [5, 6], GREEDY, lora_request=each) for each in given[:2]]
    requests = [request for group in groups for request in group.requests]
    with pytest.raises(QueueFullError, match="running requests have max_loras 2 other adapters"):
        new_group(llm, [5, 6], GREEDY, lora_request=given[2])
    for request in requests:
        llm.engine.scheduler.add(request)
    llm.engine.step()
    # Unloaded, it keeps its place until its request has ended.
    assert llm.remove_lora(1)
    assert llm.list_loras() == [given[1]]
    with pytest.raises(QueueFullError):
        llm.add_lora(given[2])
    step_until_ended(llm, requests)
    assert [request.completion().token_ids for request in requests] == alone
    llm.add_lora(given[2])
    assert not llm.remove_lora(1)


def test_a_batch_of_more_adapters_than_places_is_refused(three: tuple[LLM, list[LoRARequest]]) -> None:
    llm, given = three
    with pytest.raises(QueueFullError, match="max_loras 2"):
        llm.generate([[5, 6]] * 3, GREEDY, lora_request=given, use_tqdm=False)
    assert not llm.engine.has_unfinished
    assert len(llm.generate([[5, 6]] * 2, GREEDY, lora_request=given[1:], use_tqdm=False)) == 2


def test_requests_that_cannot_be_served_are_refused(world: World, tmp_path: Path) -> None:
    llm = engine(world)
    one = world.adapter(1)
    assert one is not None
    refused: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: llm.generate([[5]], GREEDY, lora_request="first"), ValueError, "it must be a LoRARequest"),
        (lambda: llm.generate([[5]], GREEDY, lora_request=[one, one]), ValueError, "2 lora_requests for 1 prompts"),
        (lambda: llm.add_lora(LoRARequest("x", 9, str(tmp_path / "x"))), CheckpointError, "no such folder"),
        (lambda: LoRARequest("x", 0, "x"), ValueError, "lora_int_id is 0; it must be between 1"),
        (lambda: LoRARequest("", 1, "x"), ValueError, "lora_name is empty"),
        (lambda: LoRARequest("x", 1, lora_pth="x"), ValueError, "the nearest it has is 'lora_path'"),
    ]
    for call, kind, message in refused:
        with pytest.raises(kind, match=message):
            call()
    llm.add_lora(one)
    with pytest.raises(ValueError, match="lora_int_id 1 is that of 'first'"):
        llm.add_lora(LoRARequest("other", 1, one.lora_path))
    without = LLM(world.folder / "target", None, dtype="float64")
    with pytest.raises(ValueError, match="lora_request names 'first'; start the engine with enable_lora"):
        without.generate([[5]], GREEDY, lora_request=one)
    assert without.list_loras() == []
    assert not without.remove_lora(1)
