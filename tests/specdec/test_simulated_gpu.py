"""The engine on a simulated GPU: all tensors on one device, one host wait a step, graphs captured and replayed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import LlamaForCausalLM

from specdec import LLM, LoRARequest, SamplingParams
from specdec.core.device import resolve_dtype
from specdec.draft_heads.drafting.draft_graphs import DraftGraphs
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.tree_drafter import TreeDrafter
from specdec.execution import cost_measurement
from specdec.execution.cuda_graphs import CudaGraphs
from specdec.kernels.kernel_set import choose_kernels
from specdec.kernels.types.tree import ROOT, DraftTree
from specdec.kv_transfer.offloading_connector import OffloadingConnector
from specdec.parallel.ranks import Ranks
from specdec.verify.rejection import walk_rejection
from specdec.verify.sampling import Context, Sampling
from specdec.verify.verifier import RULES, AcceptanceRule, RejectionVerifier
from tests.baichuan import save_baichuan
from tests.fakes import save_random_block, save_random_eagle3, save_random_head, save_random_llama, save_shallow_llama
from tests.kernel_sets import TORCH
from tests.lora_adapters import save_adapter, save_draft_adapter
from tests.new_groups import new_group
from tests.profiles import by_day
from tests.simulated_gpu import GPU, SimulatedGPU, SimulatedTensor, simulated_gpu
from tests.verify.sampled_rows import SampledRow, verify

pytestmark = pytest.mark.slow

SHAPE = DraftShape(3, 2, 6)
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22], [20, 21, 22]]
# So few blocks that a request must give way to another.
CRAMPED: dict[str, Any] = {
    "enforce_eager": True,
    "max_num_seqs": 3,
    "kv_cache_memory": 5 * 8 * (3 * 4 * 16 + 32) * 4,
}

PENALISED = {
    "temperature": 0.8,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.2,
    "min_tokens": 3,
    "ignore_eos": False,
}
LIMITED = {"frequency_penalty": 0.5, "logit_bias": {7: 3.0}, "allowed_token_ids": list(range(5, 60))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("simulated")
    target = save_random_llama(folder / "target", head_dim=16)
    save_shallow_llama(folder / "small", target)
    save_random_head(folder / "head", head_dim=16)
    save_random_eagle3(folder / "head3", head_dim=16)
    for kind in ("dspark", "domino", "dflash2"):
        save_random_block(folder / kind, kind, head_dim=16, num_hidden_layers=1)
    return folder


def load(folder: Path, head: str | None, **settings: Any) -> LLM:
    return LLM(
        folder / "target",
        head and folder / head,
        **{  # type: ignore[arg-type]
            "dtype": "float32",
            "shape": SHAPE,
            "adaptive_drafts": False,
            "prefill_stretch": 0,
            "max_model_len": 48,
            "max_num_seqs": 2,
            "block_size": 8,
            "kv_cache_memory": 1 << 18,
            **settings,
        },
    )


def graphs_of_drafting(llm: LLM) -> DraftGraphs | None:
    drafter = llm.engine.worker.drafter
    assert isinstance(drafter, TreeDrafter)
    return drafter.graphs


def run(
    llm: LLM, params: list[SamplingParams], adapters: Sequence[LoRARequest | None] = (None, None)
) -> list[list[list[int]]]:
    groups = [
        new_group(llm, prompt, own, lora_request=adapter)
        for prompt, own, adapter in zip(PROMPTS, params, adapters, strict=True)
    ]
    for request in (request for group in groups for request in group.requests):
        llm.engine.scheduler.add(request)
    while llm.engine.has_unfinished:
        llm.engine.step()
    return [[list(one.token_ids) for one in group.output().outputs] for group in groups]


# Head, settings, parameters of the two requests.
CASES: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "eagle3, in a window": (
        "head3",
        {"draft_window_size": 6},
        [{"temperature": 0.7, "top_k": 9, "min_p": 0.1}, {"temperature": 1.0, "n": 2}],
    ),
    "dspark in a window, rejection": (
        "dspark",
        {"verify": "rejection", "draft_window_size": 8},
        [{}, {"temperature": 0.8, "top_p": 0.8}],
    ),
    "edited": ("head", {"shape": DraftShape(2, 2, 4)}, [PENALISED, LIMITED]),
    "domino, cramped": ("domino", CRAMPED, [{"max_tokens": 12}, {"temperature": 1.0, "n": 2, "max_tokens": 12}]),
    "keys and values in 8 bits": ("head", {"kv_cache_dtype": "int8"}, [{}, {"temperature": 1.0, "n": 2}]),
    "eagle": (
        "head",
        {"kv_cache_memory": None, "max_num_batched_tokens": 32},
        [{"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.0}],
    ),
    "small model": ("small", {}, [{}, {"temperature": 0.7}]),
    "rejection": ("head3", {"verify": "rejection"}, [{}, {"temperature": 0.8, "top_p": 0.8}]),
    "dflash2, rejection": ("dflash2", {"verify": "rejection"}, [{"temperature": 1.0}, {"temperature": 0.8}]),
}


@pytest.mark.parametrize("name", by_day(list(CASES), 5, short=1))
def test_tokens_are_those_of_a_cpu_and_the_host_waits_once_a_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    head, settings, asked = CASES[name]
    params = [
        SamplingParams(**{"temperature": 0.0, "seed": i, "max_tokens": 4, "ignore_eos": True, **own})
        for i, own in enumerate(asked)
    ]
    expected = run(load(folder, head, **settings), params)
    with simulated_gpu(monkeypatch) as gpu:
        llm = load(folder, head, device="cuda", **settings)
        assert torch.device(llm.config.device) == GPU
        assert isinstance(llm.model.output.weight, SimulatedTensor)
        graphs = graphs_of_drafting(llm)
        captured = graphs and [len(graphs.search.captured), len(graphs.draw.captured)]
        step, steps = llm.engine.step, list[list[str]]()

        def watched() -> Any:
            before = len(gpu.waits)
            found = step()
            steps.append(gpu.waits[before:])
            return found

        monkeypatch.setattr(llm.engine, "step", watched)
        assert run(llm, params) == expected
        assert llm.stats().drafts_verified > 0
        once = ["specdec.kernels.types.upload: synchronize of an event"]
        assert all(waits in ([], once) for waits in steps), steps
        assert steps.count(once) > 1
        # Captured at the start, of one row and of two; drawn trees where the rule weighs them.
        assert captured == (None if settings is CRAMPED else [2, 2 if "verify" in settings else 0])
        assert captured == (graphs and [len(graphs.search.captured), len(graphs.draw.captured)])
        assert (llm.engine.worker.runner.graphs is None) == (settings is CRAMPED)
        assert llm.stats().preemptions > 0 or settings is not CRAMPED


@pytest.mark.long
def test_a_rule_of_a_plugin_gets_what_drafts_were_drawn_from(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without q, rejection sampling comes to other tokens. Trees of requests with a grammar are on the host already."""
    with_rule = partial(RejectionVerifier, rule=walk_rejection)
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=8, ignore_eos=True) for seed in (0, 1)]
    settings = {"verify": "rejection", "enforce_eager": True}
    expected = run(load(folder, "head3", **settings), params)
    tree = DraftTree((1, 2, 3), (ROOT, ROOT, 0), torch.rand(4, 7).softmax(-1))
    rows, logits = [SampledRow(tree, Context(Sampling(seed=seed), [0], 1)) for seed in range(8)], torch.rand(32, 7)
    walked = verify(RejectionVerifier(TORCH), rows, logits)
    with simulated_gpu(monkeypatch):
        monkeypatch.setattr(RULES, "_found", {**RULES, "rejection": AcceptanceRule(with_rule, draws=True)})
        assert run(load(folder, "head3", device="cuda", **settings), params) == expected
        assert tree.draft_probs is not None
        there = replace(tree, draft_probs=tree.draft_probs.to(GPU))
        assert verify(with_rule(TORCH), [row._replace(tree=there) for row in rows], logits.to(GPU)) == walked


@pytest.mark.parametrize("settings", [{"kernels": "torch"}, {"verify": "rejection", "enforce_eager": True}])
def test_plain_steps_go_ahead_with_tokens_that_the_host_has(
    folder: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """Where the acceptance rule runs on the host: beside kernels in torch, and a plug-in's beside Triton's."""
    params = [SamplingParams(temperature=i, seed=3, max_tokens=5 - 2 * i, ignore_eos=True) for i in (0, 1)]
    expected = run(load(folder, None, **settings), params)
    with simulated_gpu(monkeypatch):
        host_rule = AcceptanceRule(partial(RejectionVerifier, rule=walk_rejection), draws=True)
        monkeypatch.setattr(RULES, "_found", {**RULES, "rejection": host_rule})
        llm = load(folder, None, device="cuda", **settings)
        ahead = Mock(wraps=llm.engine.worker._prepare_next)
        monkeypatch.setattr(llm.engine.worker, "_prepare_next", ahead)
        assert run(llm, params) == expected
        assert ahead.called


def test_kernels_without_graphs_keep_no_room_for_a_tree_ahead(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_gpu(monkeypatch):
        budget = load(folder, "head3", device="cuda", kernels="torch").engine.scheduler.draft_budget
        assert budget is not None
        assert not budget.follows


@pytest.mark.usefixtures("gpu")
def test_older_gpus_have_neither_bfloat16_nor_the_triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is named counts, where a machine has several."""
    old, new = GPU, torch.device("cuda", 0)
    chips = {old: SimpleNamespace(major=7, minor=5), new: SimpleNamespace(major=8, minor=0)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", chips.__getitem__)
    assert [resolve_dtype("auto", device) for device in (old, new)] == [torch.float32, torch.bfloat16]
    assert choose_kernels("auto", new, torch.float32).name == "triton"
    assert choose_kernels("auto", old, torch.float32).name == "torch"
    refusal = "take a GPU of compute capability 8.0 or newer, and cuda:1 has 7.5; use kernels 'torch'$"
    with pytest.raises(ValueError, match=refusal):
        choose_kernels("triton", old, torch.float32)


@pytest.mark.long
def test_adapters_on_a_device(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Steps with adapters and without are replayed from graphs of their own; the host waits for no adapter."""
    target = LlamaForCausalLM.from_pretrained(folder / "target", dtype="float64")
    draft = save_draft_adapter(tmp_path / "draft", folder / "head3")
    adapter = LoRARequest("a", 1, str(save_adapter(tmp_path / "adapter", target, 5)), str(draft))
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (3, 4)]
    settings = {"enable_lora": True, "max_loras": 1}
    own = load(folder, "head3", **settings)
    expected, without = drafted(own, params, adapter), run(own, params)
    own.remove_lora(1)
    plainly = drafted(own, params, replace(adapter, draft_lora_path=None))
    assert expected[0] == plainly[0] != [one[0] for one in without]
    assert expected[1][0] != plainly[1][0]
    assert expected[1][1] == plainly[1][1]
    with simulated_gpu(monkeypatch) as gpu:
        llm = load(folder, "head3", device="cuda", **settings)
        llm.add_lora(adapter)
        before = len(gpu.waits)
        assert drafted(llm, params, adapter) == expected
        assert set(gpu.waits[before:]) == {
            "specdec.kernels.types.upload: synchronize of an event",
            "specdec.engine.step_results: tolist",
        }
        assert run(llm, params) == without
        graphs, drafting = llm.engine.worker.runner.graphs, graphs_of_drafting(llm)
        assert graphs is not None
        assert drafting is not None
        assert {key.adapted for key in graphs.captured} == {False, True}
        assert {adapted for _, adapted in drafting.search.captured} == {False, True}


def drafted(
    llm: LLM, params: list[SamplingParams], adapter: LoRARequest
) -> tuple[list[list[int]], list[list[tuple[int, ...]]]]:
    """The tokens and the trees of two requests in one batch, of which the first has an adapter."""
    given = zip(PROMPTS, params, (adapter, None), strict=True)
    groups = [new_group(llm, prompt, own, lora_request=one) for prompt, own, one in given]
    for group in groups:
        for request in group.requests:
            request.is_traced = True
        llm.engine.scheduler.add(group.requests[0])
    while llm.engine.has_unfinished:
        llm.engine.step()
    steps = [group.requests[0].steps for group in groups]
    return [[t for step in own for t in step.trace.output] for own in steps if own], [
        [step.trace.tokens for step in own] for own in steps
    ]


@pytest.mark.long
@pytest.mark.usefixtures("gpu")
def test_costs_are_measured_within_the_context(folder: Path) -> None:
    """The block tables of graphs are as long as the context, which may be shorter than what the model was made for."""
    llm = load(folder, "head3", device="cuda", adaptive_drafts=True)
    assert llm.engine.scheduler.step_cost is not None
    assert max(llm.engine.scheduler.step_cost.passes.xs) <= llm.config.max_model_len == 48


@pytest.mark.long
def test_slopes_lie_on_the_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Captured passes read them, of a target with ALiBi and of such a model that drafts."""
    sizes = {"hidden_size": 48, "num_attention_heads": 3, "num_hidden_layers": 1}
    twin = save_baichuan(tmp_path / "target", **sizes)
    params, prompt = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True), PROMPTS[1]
    with simulated_gpu(monkeypatch):
        llm = load(tmp_path, "target", device="cuda", shape=DraftShape(1, 1, 1), max_num_seqs=1)
        assert llm.engine.worker.runner.graphs is not None
        assert llm.generate([prompt], params, use_tqdm=False)[0].token_ids == twin.greedy(prompt, 3)
        assert llm.stats().drafts_verified > 0


@pytest.mark.long
def test_graphs_are_captured_anew_for_another_head(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays of the old graphs would draft with the old weights, and project the taps by them."""
    params = [SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)] * 2
    save_random_eagle3(folder / "other", seed=1, head_dim=16)
    new = load(folder, "other", max_num_seqs=1)
    expected = run(new, params)
    with simulated_gpu(monkeypatch):
        llm = load(folder, "head3", max_num_seqs=1, device="cuda")
        llm.update_draft(folder / "other")
        graphs = graphs_of_drafting(llm)
        assert graphs is not None
        assert len(graphs.search.captured) == 1
        assert run(llm, params) == expected
        assert llm.stats().trees_by_accepted == new.stats().trees_by_accepted


@pytest.mark.long
def test_scores_of_choices_are_those_of_a_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In trees of more words than the captured graphs have, beside drafts."""
    choices = [[token, token + 1] for token in range(5, 75)]
    params = [SamplingParams(choices=choices), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)]
    settings: dict[str, Any] = {"max_num_batched_tokens": 128, "max_model_len": 96}

    def found(llm: LLM) -> tuple[list[list[float]], list[int]]:
        scored, said = llm.generate(PROMPTS[::-1], params, use_tqdm=False)
        assert scored.choices is not None
        return [score.logprobs for score in scored.choices], said.token_ids

    expected = found(load(folder, "head", **settings))
    with simulated_gpu(monkeypatch):
        scores, tokens = found(load(folder, "head", device="cuda", **settings))
    assert tokens == expected[1]
    for own, other in zip(scores, expected[0], strict=True):
        assert own == pytest.approx(other, abs=1e-5)


@pytest.mark.long
def test_blocks_of_host_memory_are_loaded_before_they_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts alternate in a cache for one. Copies run as late as the engine's waits allow."""
    extra = {"cpu_bytes_to_use": 1 << 20}
    connector = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    prompts = [[*PROMPTS[0], number] for number in (5, 6)]
    prompts[1][0] = 9
    small: dict[str, Any] = {"max_num_seqs": 1, "kv_cache_memory": 5 * 8 * (3 * 4 * 16 + 32) * 4}
    expected = [load(folder, "head3", max_num_seqs=1).generate([prompt], params)[0].token_ids for prompt in prompts]
    with (
        simulated_gpu(monkeypatch) as gpu,
        load(folder, "head3", device="cuda", kv_transfer_config=connector, **small) as llm,
    ):
        gpu.streams.are_late = True
        passes = list[bool]()
        for prompt, tokens in 2 * list(zip(prompts, expected, strict=True)):
            gpu.waits.clear()
            (output,) = llm.generate([prompt], params)
            passes.append(output.num_cached_tokens == 16)
            assert output.token_ids == tokens
            assert set(gpu.waits) == {"specdec.kernels.types.upload: synchronize of an event"}
        assert isinstance(llm.engine.connector, OffloadingConnector)
        assert llm.engine.connector._num_begun > 0
    assert passes == [False, False, True, True]


@pytest.mark.usefixtures("gpu")
def test_operations_that_a_gpu_refuses_are_refused() -> None:
    there, here = torch.arange(3, device=GPU), torch.arange(3)
    assert there.device == GPU
    assert there.tolist() == [0, 1, 2]
    with pytest.raises(RuntimeError, match="expected all tensors on the same device"):
        there + here
    with pytest.raises(AssertionError, match="item while a graph is captured"):
        CudaGraphs(GPU).capture(lambda: there.sum().item())
    with pytest.raises(AssertionError, match="to from pageable memory while a graph"):
        CudaGraphs(GPU).capture(lambda: here.to(GPU))


def test_waits_of_the_host_are_noted(gpu: SimulatedGPU) -> None:
    there = torch.tensor([1, 2], pin_memory=True).to(GPU, non_blocking=True)
    assert gpu.waits == []
    torch.tensor([1, 2]).to(GPU, non_blocking=True)
    there[there > 1]
    bool(there.any())
    torch.tensor([1], device=GPU)
    there[0], there[:1] = 3, 4
    for number in (5, torch.tensor(6)):
        there[there.clone()[:1] * 0] = number
    assert [wait.split(": ")[1] for wait in gpu.waits] == [
        "to from pageable memory", "__getitem__", "__bool__", "tensor from pageable memory", "__setitem__",
        "__setitem__",
    ]  # fmt: skip


@pytest.mark.usefixtures("gpu")
def test_pinned_memory_is_not_to_change_under_a_copy() -> None:
    source = torch.tensor([1, 2], pin_memory=True)
    for waits in (True, False):
        there = source.to(GPU, non_blocking=True)
        if waits:
            assert there.tolist() == [1, 2]
        source[0] += 1
    with pytest.raises(AssertionError, match="has changed while a copy"):
        there.tolist()


@pytest.mark.usefixtures("gpu")
def test_a_replay_runs_what_was_launched_and_no_python() -> None:
    """So a number that the host had at the capture stays, and nothing has a value before the first replay."""
    factor, calls = 2, []
    there = torch.ones(2, device=GPU)

    def work() -> torch.Tensor:
        calls.append(1)
        found = there.view(1, 2) * factor + torch.arange(2, device=GPU)
        found[:, 1] = 7
        return found

    replay = CudaGraphs(GPU).capture(work)
    captured, factor = len(calls), 3
    there.fill_(5)
    first = replay()
    assert first.tolist() == [[10, 7]]
    there.fill_(6)
    assert replay() is first
    assert first.tolist() == [[12, 7]]
    assert len(calls) == captured


@pytest.mark.long
def test_times_are_of_the_device_and_never_of_launches_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, gpu: SimulatedGPU
) -> None:
    """At the start each part is waited for; later a step without a wait is not measured, nor is the next one."""
    measured = list[str]()
    timed = cost_measurement._timed

    def watched(ranks: Ranks, work: Callable[[], None]) -> float:
        gpu.waits.clear()
        seconds = timed(ranks, work)
        measured.append(gpu.waits[-1] if gpu.waits else "nobody waited")
        return seconds

    monkeypatch.setattr(cost_measurement, "_timed", watched)
    monkeypatch.setattr(cost_measurement, "ROUNDS", 1)
    monkeypatch.setattr(cost_measurement, "ROWS", (1, 2))
    monkeypatch.setattr(cost_measurement, "TOKENS", (1, 4))
    settings = {"enforce_eager": True, "prefill_stretch": 1.75, "adaptive_drafts": True, "max_num_batched_tokens": 8}
    llm = load(folder, "head", device="cuda", shape=DraftShape(2, 2, 3), **settings)
    assert set(measured) == {"specdec.execution.model_runner: synchronize"}
    cost = llm.engine.scheduler.step_cost
    assert cost is not None
    corrected = Mock(wraps=cost.correct)
    monkeypatch.setattr(cost, "correct", corrected)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    llm.engine.scheduler.add(new_group(llm, PROMPTS[0], params).requests[0])
    counts = []
    while llm.engine.has_unfinished:
        llm.engine.step()
        counts.append(corrected.call_count)
    # Two chunks, a third that ends the prompt, and then the lesson of each step is learnt in the next.
    assert counts[:4] == [0, 0, 0, 0]
    assert counts[4:] == list(range(1, len(counts) - 3))
