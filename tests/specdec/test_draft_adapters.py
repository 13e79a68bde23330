"""Adapters of the draft model: trees of the merged weights, the target's tokens, prefixes, and what is refused."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from specdec import LLM, CheckpointError, LoRARequest, SamplingParams
from specdec.core.engine_stats import TreeCount
from specdec.core.outputs import TreeTrace
from specdec.kernels.native.library import library_file
from tests.lora_adapters import save_draft_adapter, save_merged_draft
from tests.specdec.adapted_engine import GREEDY, engine, prompts
from tests.specdec.world import World

pytestmark = pytest.mark.slow

needs_library = pytest.mark.skipif(library_file() is None, reason="the native kernels are not built here")
# Of four requests: adapter of the target, and of the draft model.
TARGETS, DRAFTS = [1, 2, 0, 1], [1, 0, 2, 2]


def traced(llm: LLM, params: list[SamplingParams], given: Sequence[LoRARequest | None]) -> list[list[TreeTrace]]:
    """The steps of each of four requests."""
    found: dict[str, list[TreeTrace]] = {}
    for state in llm.stream(prompts(4), params, lora_request=list(given), trace=True):
        if state.finished:
            found[state.request_id] = [step.trace for step in state.outputs[0].steps if step.trace is not None]
    return [found[key] for key in sorted(found, key=int)]


def trees(steps: Sequence[TreeTrace]) -> list[tuple[Any, ...]]:
    return [(step.root, step.tokens, step.parents, step.path, step.output) for step in steps]


def tokens(steps: Sequence[TreeTrace]) -> list[int]:
    return [token for step in steps for token in step.output]


def requests(world: World, drafts: Sequence[Path]) -> list[LoRARequest]:
    """Requests with adapters of either model, of both, and with the same one of one model and two of the other."""
    found = []
    for number, (target, draft) in enumerate(zip(TARGETS, DRAFTS, strict=True), 11):
        path = str(world.adapters[target - 1]) if target else ""
        found.append(LoRARequest(f"a{number}", number, path, str(drafts[draft - 1]) if draft else None))
    return found


@pytest.fixture(scope="module")
def made(world: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two adapters of a draft model, and the draft models that they make of it."""
    root, known = tmp_path_factory.mktemp("drafts"), dict[str, tuple[list[Path], list[Path]]]()

    def make(draft: str) -> tuple[list[Path], list[Path]]:
        if draft not in known:
            head = world.draft(draft)
            assert head is not None
            own = [save_draft_adapter(root / f"{draft}-{seed}", head, 2 + seed, seed) for seed in (1, 2)]
            merged = [save_merged_draft(root / f"{draft}-merged-{i}", head, each) for i, each in enumerate(own)]
            known[draft] = own, merged
        return known[draft]

    return make


# An edit of one row's logits leads all rows past the drafter in one call.
CASES = [
    *(("torch", draft, {}, 0.0) for draft in ("dflash2", "llama")),
    *(("torch", draft, {}, 1.0) for draft in ("eagle3", "dspark")),
    *(
        pytest.param("native", draft, edits, 1.0, marks=needs_library)
        for draft in ("eagle", "eagle3", "dspark", "llama")
        for edits in ({}, {"presence_penalty": 0.1})
        if not edits or draft == "dspark"
    ),
]


@pytest.mark.long
@pytest.mark.parametrize(("kernels", "draft", "edits", "temperature"), CASES)
def test_trees_are_those_of_the_merged_draft_model(
    world: World, made: Any, kernels: str, draft: str, edits: dict[str, float], temperature: float
) -> None:
    """Four requests with two adapters of each model in one batch."""
    adapters, merged = made(draft)
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=8, ignore_eos=True, **(edits if i == 2 else {}))
        for i in range(4)
    ]
    dtype = "float64" if kernels == "torch" else "float32"
    plain = [world.adapter(target) for target in TARGETS]
    llm = engine(world, draft, kernels=kernels, dtype=dtype)
    found = traced(llm, params, requests(world, adapters))
    without = traced(llm, params, plain)
    for number in (1, 2):
        other = engine(world, merged[number - 1], kernels=kernels, dtype=dtype)
        wanted = traced(other, params, plain)
        for row in (row for row, own in enumerate(DRAFTS) if own == number):
            assert trees(found[row]) == trees(wanted[row]) != trees(without[row])
    assert trees(found[1]) == trees(without[1])
    # The tokens are the target's, whatever drafts.
    assert [tokens(steps) for steps in found] == [tokens(steps) for steps in without]


@pytest.mark.long
def test_the_adapter_of_the_draft_model_sets_prefixes_apart(world: World, made: Any) -> None:
    """Its entries are in the same blocks as the target's."""
    adapters, _ = made("eagle3")
    (prompt,), params = prompts(1, 60), SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    llm = engine(world, "eagle3", block_size=8, max_loras=8)
    given = [
        LoRARequest("a", 1, str(world.adapters[0])),
        LoRARequest("a", 2, str(world.adapters[0]), str(adapters[0])),
        LoRARequest("a", 3, str(world.adapters[0]), str(adapters[1])),
        LoRARequest("a", 4, "", str(adapters[1])),
    ]
    outputs = [llm.generate([prompt], params, lora_request=each, use_tqdm=False)[0] for each in [*given, *given, None]]
    assert [output.num_cached_tokens > 0 for output in outputs] == [False] * 4 + [True] * 4 + [False]
    assert len({tuple(output.token_ids) for output in outputs[:3]}) == 1
    assert outputs[3].token_ids == outputs[8].token_ids != outputs[0].token_ids


@pytest.mark.long
def test_tau_is_told_for_each_adapter_and_either_draft_model(world: World, made: Any) -> None:
    adapters, _ = made("eagle3")
    llm = engine(world, "eagle3")
    plain, adapted = (
        LoRARequest("a", 1, str(world.adapters[0])),
        LoRARequest("a", 2, str(world.adapters[0]), str(adapters[0])),
    )
    given = [plain, adapted, None, LoRARequest("b", 3, "", str(adapters[1]))]
    outputs = llm.generate(prompts(4), GREEDY, lora_request=given, use_tqdm=False)
    assert [output.lora_request for output in outputs] == given
    found = llm.stats().adapters
    before = deepcopy(found)
    llm.generate(prompts(1), GREEDY, lora_request=adapted, use_tqdm=False)
    assert found == before != llm.stats().adapters
    counts = [found["a"].plain, found["a"].adapted, TreeCount(), found["b"].adapted]
    assert found["b"].plain == TreeCount()
    for output, count in zip(outputs, counts, strict=True):
        steps = output.outputs[0].tree_steps
        accepted = sum(step.accepted for step in steps)
        if output.lora_request is not None:
            assert count.trees == len(steps) > 0
            # The last step may end before its bonus token.
            assert 1 <= count.tau == count.tokens / count.trees
            assert accepted + len(steps) - 1 <= count.tokens <= accepted + len(steps)
    labels = [metric.labels for metric in llm.get_metrics() if metric.name == "specdec:adapter_drafts"]
    assert [(each["lora_name"], each["draft_model"]) for each in labels] == [
        ("a", "plain"),
        ("a", "adapted"),
        ("b", "adapted"),
    ]


def test_adapters_unfit_for_the_draft_model_are_refused(world: World, made: Any, tmp_path: Path) -> None:
    adapters, _ = made("eagle3")
    llm = engine(world, "eagle3")
    for path, message in (
        (str(tmp_path / "x"), "x: no such folder"),
        (str(world.adapters[0]), "tensors that are not supported: .*of the draft model's 1 layers"),
    ):
        with pytest.raises(CheckpointError, match=message):
            llm.add_lora(LoRARequest("x", 1, str(world.adapters[0]), path))
    # Names of EAGLE-3's layer are no target's.
    with pytest.raises(CheckpointError, match="of the target's 2 layers"):
        llm.add_lora(LoRARequest("x", 1, str(adapters[0])))
    assert llm.list_loras() == []
    with pytest.raises(ValueError, match="drafts without a model; leave it out"):
        engine(world).add_lora(LoRARequest("x", 1, "", str(adapters[0])))
    with pytest.raises(ValueError, match="draft_lora_path is empty"):
        LoRARequest("x", 1, "x", "")
    with pytest.raises(ValueError, match="lora_path is empty"):
        LoRARequest("x", 1)


@pytest.mark.long
def test_a_head_with_adapters_is_not_replaced(world: World, made: Any) -> None:
    adapters, _ = made("eagle3")
    llm = engine(world, "eagle3")
    llm.add_lora(LoRARequest("mine", 1, "", str(adapters[0])))
    with pytest.raises(ValueError, match="the adapter 'mine' is made for the present draft model too; unload it first"):
        llm.update_draft(world.other("eagle3"))
    assert llm.remove_lora(1)
    llm.update_draft(world.other("eagle3"))
    # The new head has a bank of its own.
    llm.generate([[5, 6]], GREEDY, lora_request=LoRARequest("mine", 1, "", str(adapters[0])), use_tqdm=False)
