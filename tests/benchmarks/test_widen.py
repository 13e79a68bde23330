"""The widened target and heads compute what the demo's compute."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.report import read_prompts
from benchmarks.widen import Sizes, widen
from specdec import LLM, DraftShape, SamplingParams
from specdec.config import DEMO
from specdec.draft_heads.drafting.drafter import DraftRow
from specdec.draft_heads.heads.eagle3 import default_taps
from specdec.kernels.types.draft_trees import DraftTrees
from specdec.kernels.types.upload import Packet
from tests.profiles import by_day

pytestmark = pytest.mark.slow

# The real hidden size, on which exactness depends; the others are smaller for the sake of time.
SIZES = Sizes(inner=768, heads=8, kv_heads=4, num_layers=11, layers=(0, 1, 2, 3, 4, 6, 7, 8, 9, 10))
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    widen(folder, SIZES)
    return folder


def prompts(llm: LLM) -> list[list[int]]:
    """Return the ends of two real prompts."""
    return [llm.chat_prompt(read_prompts(name)[0])[-24:] for name in ("sgd-eval", "gsm8k-eval")]


@pytest.mark.long
def test_logits_in_float32_are_the_demos(wide: Path) -> None:
    small, large = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (DEMO / "target", wide / "target")
    )
    for prompt in prompts(LLM(draft=None)):
        with torch.inference_mode():
            want, got = (model(torch.tensor([prompt])).logits for model in (small, large))
        # Logits reach 20, where float32 numbers are 2e-6 apart.
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("head", by_day(["eagle3", "eagle", "dspark"], 1))
def test_tokens_and_draft_trees_are_the_demos(wide: Path, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"shape": DraftShape(4, 4, 12), "kv_cache_memory": 64 << 20}
    runs = []
    for target, draft in ((DEMO / "target", DEMO / head), (wide / "target", wide / head)):
        llm = LLM(target, draft, dtype="float64", adaptive_drafts=False, **settings)
        trees = recorded_trees(llm, monkeypatch)
        outputs = llm.generate(prompts(llm), PARAMS)
        runs.append((trees, [(output.text, output.token_ids) for output in outputs]))
    (want_trees, want), (trees, got) = runs
    assert got == want
    assert trees == want_trees
    assert max(len(tokens) for tokens, _ in trees) > 1


def recorded_trees(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Return a list to which every tree's tokens and parents are added when it is drafted."""
    recorded: list[tuple[list[int], list[int]]] = []
    drafter = llm.engine.worker.drafter
    propose = drafter.propose

    def record(rows: Sequence[DraftRow], packet: Packet | None = None) -> DraftTrees:
        trees = propose(rows, packet)
        recorded.extend((list(tree.tokens), list(tree.parents)) for tree in trees.read())
        return trees

    monkeypatch.setattr(drafter, "propose", record)
    return recorded


def test_sizes_are_those_of_a_256m_model_with_the_default_taps() -> None:
    sizes = Sizes()
    products = sizes.hidden * 64 * 2 * (sizes.heads + sizes.kv_heads) + 3 * sizes.hidden * sizes.inner
    assert round((sizes.num_layers * products + 4096 * sizes.hidden) / 1e6) == 256
    assert tuple(sizes.layers[tap] for tap in default_taps(len(sizes.layers))) == default_taps(sizes.num_layers)


@pytest.mark.long
def test_every_weight_and_epsilon_is_exact(wide: Path) -> None:
    """In bfloat16, halves of the demo's norms; nothing else has other values."""
    for part in ("target", "eagle3", "eagle", "dspark"):
        small, large = (load(folder / part) for folder in (DEMO, wide))
        for name, tensor in large.items():
            source = name
            if part == "target" and ".layers." in name:
                layer = int(name.split(".")[2])
                if layer not in SIZES.layers:
                    continue
                source = name.replace(f".{layer}.", f".{SIZES.layers.index(layer)}.")
            factor = 2 if name.endswith("norm.weight") and not name.endswith(("q_norm.weight", "k_norm.weight")) else 1
            got, want = (values[values != 0] for values in (tensor * factor, small[source]))
            assert tensor.dtype == small[source].dtype
            assert torch.equal(got, want)


def load(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(folder / "model.safetensors"))
