"""The target's pass in one call against packing, layers and features one by one, with the same layers."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from specdec import LLM, DraftShape, SamplingParams
from specdec.draft_heads.drafting.tree_drafter import TreeDrafter
from specdec.draft_heads.heads.eagle3 import Eagle3Form
from specdec.draft_heads.llama.mlp import GatedMLP
from specdec.execution.model_runner import PreparedPass
from specdec.kernels.native.library import library_file
from specdec.kernels.types.draft_trees import DraftTrees, HostTrees
from specdec.kernels.types.tree import TreeRow
from specdec.kernels.types.upload import Packet
from tests.specdec.world import VOCAB, World

pytestmark = pytest.mark.skipif(library_file() is None, reason="the native kernels are not built here")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("draft", ["none", "eagle", "eagle3", "dspark", "llama"])
@pytest.mark.parametrize(
    ("shape", "kv_cache_dtype"),
    [(DraftShape(5, 4, 30), "auto"), (DraftShape(30, 3, 80), "auto"), (DraftShape(5, 4, 30), "int8")],
)
def test_a_pass_is_the_same(
    world: World, draft: str, dtype: str, shape: DraftShape, kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits and everything stored, bit by bit: prompts in chunks, scored prompts, trees of more than 64 nodes."""
    folder = world.draft(draft)
    settings = {"dtype": dtype, "kernels": "native", "kv_cache_dtype": kv_cache_dtype, "max_num_batched_tokens": 128}
    if folder:
        settings |= {"shape": shape, "adaptive_drafts": False}
    llm = LLM(world.folder / "target", folder, **settings)
    runner = llm.engine.worker.runner
    one_call, prepare, cache = runner.one_call, runner.prepare, runner.cache
    assert one_call is not None
    passes = 0

    def both(parts: Sequence[TreeRow], trees: DraftTrees, packet: Packet) -> PreparedPass:
        def run(tokens: Tensor | None = None) -> Tensor:
            assert tokens is None
            return compared(parts, trees, packet)

        return run

    def forward(parts: Sequence[TreeRow], trees: DraftTrees, packet: Packet) -> Tensor:
        run = prepare(parts, trees, packet)
        packet.send()
        return run()

    def compared(parts: Sequence[TreeRow], trees: DraftTrees, packet: Packet) -> Tensor:
        nonlocal passes
        # Whole slots, with the scales of codes.
        stored = [cache.parts["target"], *([] if cache.features is None else [cache.features])]
        before = [part.clone() for part in stored]
        runner.one_call = None
        expected = forward(parts, trees, packet)
        after = [part.clone() for part in stored]
        for part, kept in zip(stored, before, strict=True):
            part.copy_(kept)
        runner.one_call = one_call
        found = forward(parts, trees, packet)
        assert found.equal(expected)
        for part, one_by_one in zip(stored, after, strict=True):
            # Memory that nothing has written yet may hold anything.
            assert part.view(torch.uint8).equal(one_by_one.view(torch.uint8))
        passes += 1
        return found

    monkeypatch.setattr(runner, "prepare", both)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, VOCAB, (7 + 60 * i,), generator=generator).tolist() for i in range(3)]
    params = [
        SamplingParams(temperature=t, seed=3, max_tokens=12, ignore_eos=True, prompt_logprobs=scored)
        for t, scored in ((0.0, None), (1.0, 2), (0.0, None))
    ]
    llm.generate(prompts, params, use_tqdm=False)
    assert passes > 3


def test_a_feature_that_the_call_does_not_know_is_made_in_python(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, params = [list(range(5, 15))], SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    outputs, accepted = [], []
    for is_known in (True, False):
        if not is_known:
            monkeypatch.setattr(Eagle3Form, "feature_weights", lambda _: None)
        llm = LLM(
            world.folder / "target", world.draft("eagle3"), dtype="float32", kernels="native", adaptive_drafts=False
        )
        assert (llm.engine.worker.runner.one_call is not None) == is_known
        (output,) = llm.generate(prompts, params, use_tqdm=False)
        outputs.append(output.outputs[0].token_ids)
        accepted.append(sum(output.stats.accepted_per_depth))
    assert outputs[0] == outputs[1]
    assert accepted[0] == accepted[1]


@pytest.mark.parametrize("draft", ["none", "eagle", "eagle3", "dspark", "llama"])
@pytest.mark.parametrize("enable_lora", [False, True])
def test_layers_with_an_mlp_that_the_call_does_not_know_run_part_by_part(
    world: World, draft: str, enable_lora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Target and draft model then have no pass in one call, and the same outputs."""
    prompts, params = [list(range(5, 15))], SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    settings = {"dtype": "float32", "kernels": "native", "enable_lora": enable_lora}
    if draft != "none":
        settings["adaptive_drafts"] = False
    outputs = []
    for is_known in (True, False):
        if not is_known:
            monkeypatch.setattr(GatedMLP, "weights", lambda _: None)
        llm = LLM(world.folder / "target", world.draft(draft), **settings)
        worker = llm.engine.worker
        assert (worker.runner.one_call is not None) == is_known
        if isinstance(worker.drafter, TreeDrafter):
            assert (worker.drafter.one_call is not None) == is_known
        (output,) = llm.generate(prompts, params, use_tqdm=False)
        outputs.append(output.outputs[0].token_ids)
    assert outputs[0] == outputs[1]


def test_logits_are_overwritten_once_nobody_holds_them(world: World) -> None:
    llm = LLM(world.folder / "target", None, dtype="float32", kernels="native")
    runner = llm.engine.worker.runner

    def forward(token: int) -> Tensor:
        row = TreeRow(tokens=[token], num_cached=0, block_table=[0], num_scored=1)
        return runner.forward([row], HostTrees.empty(1))

    with torch.inference_mode():
        first = forward(5)
        kept, second = first.clone(), forward(6)
        assert first.equal(kept)
        assert not second.equal(kept)
        place, expected = second.data_ptr(), second.clone()
        del second
        third = forward(5)
        assert third.data_ptr() == place
        assert third.equal(kept)
        del first, third
        assert forward(6).equal(expected)
