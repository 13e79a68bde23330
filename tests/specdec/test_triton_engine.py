"""The whole engine on Triton kernels, in the interpreter where there is no GPU."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from specdec import LLM, LoRARequest, SamplingParams
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.drafter import Drafter, DraftRow
from specdec.draft_heads.llama.llama_layer import ComposedMixer
from specdec.kernels.kernel_set import choose_kernels
from specdec.kernels.native.library import library_file
from specdec.kernels.triton.quantized_linear import QuantizedProjection
from specdec.kernels.types.draft_trees import DraftTrees
from specdec.kernels.types.tree import DraftTree, TreeRow
from specdec.kernels.types.upload import Packet
from tests.baichuan import save_baichuan
from tests.fakes import (
    save_random_eagle3,
    save_random_head,
    save_random_llama,
    save_random_qwen3,
    save_shallow_llama,
)
from tests.lora_adapters import save_adapter, save_draft_adapter
from tests.profiles import by_day
from tests.quantized_checkpoints import quantize_folder

pytestmark = pytest.mark.slow

SHAPE = DraftShape(3, 2, 6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, and a head; sharp enough that no two tokens are nearly alike."""
    folder = tmp_path_factory.mktemp("triton")
    target = save_random_llama(folder / "target", head_dim=16)
    save_shallow_llama(folder / "small", target)
    save_random_head(folder / "head", head_dim=16)
    save_random_eagle3(folder / "head3", head_dim=16)
    return folder


def load(folder: Path, kernels: str, **settings: object) -> LLM:
    fixed = {"dtype": "float32", "shape": SHAPE, "adaptive_drafts": False, "prefill_stretch": 0, "max_model_len": 48}
    return LLM(folder / "target", **{"draft": folder / "head", **fixed, "kernels": kernels, **settings})  # type: ignore[arg-type]


GREEDY = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("head", "params", "kv_cache_dtype"),
    by_day(
        [
            (
                "head",
                SamplingParams(temperature=0.7, seed=6, max_tokens=7, top_k=20, repetition_penalty=1.3, logprobs=2),
                "auto",
            ),
            # Codes of fp8_e5m2 are so far apart that float32's roundings alone, which differ, now and then change one.
            ("head3", GREEDY, "fp8_e4m3"),
            ("head", SamplingParams(temperature=1.0, seed=5, max_tokens=7, n=2, ignore_eos=True), "auto"),
            ("head3", GREEDY, "auto"),
            ("head", GREEDY, "int8"),
        ],
        3,
    ),
    ids=["edited", "fp8_e4m3", "sampled, forked", "greedy", "int8"],
)
def test_tokens_are_those_of_plain_torch(folder: Path, head: str, params: SamplingParams, kv_cache_dtype: str) -> None:
    """The runs are in float32, with drafts, chunks, forks in the middle of a block and trees beside a prompt."""
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [20, 21, 22], [5, 6, 7, 8, 9, 10, 11, 12, 40]]
    found = []
    for kernels in ("torch", "triton"):
        settings = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "block_size": 8, "kv_cache_dtype": kv_cache_dtype}
        llm = load(folder, kernels, draft=folder / head, **settings)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([[one.token_ids for one in output.outputs] for output in outputs])
        assert llm.stats().drafts_verified > 0
    assert found[0] == found[1]


@pytest.mark.long
def test_adapters_are_those_of_plain_torch(folder: Path, tmp_path: Path) -> None:
    """Two adapters and none in one batch, with drafts, and prompts in chunks."""
    target = LlamaForCausalLM.from_pretrained(folder / "target", dtype="float64")
    folders = [save_adapter(tmp_path / f"a{rank}", target, rank, seed=rank) for rank in (3, 18)]
    drafts = [save_draft_adapter(tmp_path / f"d{rank}", folder / "head3", rank, seed=rank) for rank in (3, 18)]
    given = [
        LoRARequest("a", 1, str(folders[0]), str(drafts[0])),
        None,
        LoRARequest("b", 2, str(folders[1]), str(drafts[1])),
    ]
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [20, 21, 22], [5, 6, 7, 8, 9, 10, 11, 12, 40]]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    found, trees = [], []
    settings = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "enable_lora": True, "max_lora_rank": 18}
    for kernels in ("torch", "triton"):
        llm = load(folder, kernels, draft=folder / "head3", **settings)
        states = llm.stream(prompts, params, lora_request=given, trace=True)
        outputs = sorted((state for state in states if state.finished), key=lambda state: int(state.request_id))
        found.append([output.token_ids for output in outputs])
        trees.append([step.trace and step.trace.tokens for output in outputs for step in output.outputs[0].steps])
        assert llm.stats().drafts_verified > 0
    assert found[0] == found[1]
    assert trees[0] == trees[1]
    plain = llm.generate(prompts, params, use_tqdm=False)
    assert [output.token_ids == own for output, own in zip(plain, found[0], strict=True)] == [False, True, False]


@pytest.mark.long
@pytest.mark.parametrize("name", ["fp8-blocks", "awq", "gptq-8"])
def test_quantised_weights_stay_as_they_are_stored(folder: Path, tmp_path: Path, name: str) -> None:
    """Drafts and plain decoding are those of the dequantised weights in plain torch."""
    quantize_folder(folder / "target", tmp_path / "target", name)
    (tmp_path / "head").symlink_to(folder / "head")
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    found = []
    for kernels in ("torch", "triton"):
        llm = load(tmp_path, kernels)
        found.append(llm.generate([[5, 6, 7, 8, 9]], params, use_tqdm=False)[0].token_ids)
    assert found[0] == found[1]
    mixer = llm.model.layers[0].mixer
    assert isinstance(mixer, ComposedMixer)
    assert isinstance(mixer.mlp.products["down"], QuantizedProjection)


@pytest.mark.long
def test_choices_of_more_nodes_than_a_tree_may_have(folder: Path) -> None:
    """In trees of up to 128 nodes, two words of ancestor bits, beside a request with drafts."""
    choices = [[token, token + 1, token] for token in range(5, 75)]
    params = [SamplingParams(choices=choices), SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)]
    found, sizes = [], []
    for kernels in ("torch", "triton"):
        llm = load(folder, kernels, max_num_batched_tokens=512)
        runner = llm.engine.worker.runner

        def prepare(parts: Sequence[TreeRow], trees: DraftTrees, packet: Packet, prepare: Any = runner.prepare) -> Any:
            sizes.append(max(trees.sizes))
            return prepare(parts, trees, packet)

        runner.prepare = prepare  # type: ignore[method-assign]
        outputs = llm.generate([[5, 6, 7], [20, 21, 22]], params, use_tqdm=False)
        assert outputs[0].choices is not None
        found.append(([score.logprobs for score in outputs[0].choices], outputs[1].token_ids))
        assert max(sizes) == (140 if kernels == "torch" else 128)
        sizes.clear()
    assert found[0][1] == found[1][1]
    for own, other in zip(found[0][0], found[1][0], strict=True):
        assert own == pytest.approx(other, abs=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("window", [{}, {"draft_window_size": 6}])
def test_trees_of_a_small_model_are_those_of_plain_torch(folder: Path, window: dict[str, int]) -> None:
    """They follow the position's own noise."""
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [20]]
    params = [SamplingParams(temperature=t, seed=1, max_tokens=4, ignore_eos=True) for t in (0.0, 0.7)]
    found = []
    for kernels in ("torch", "triton"):
        llm = load(folder, kernels, draft=folder / "small", **window)
        drafter, trees = llm.engine.worker.drafter, []

        def propose(
            rows: Sequence[DraftRow],
            packet: Packet | None = None,
            drafter: Drafter = drafter,
            trees: list[DraftTree] = trees,
        ) -> DraftTrees:
            proposed = drafter.propose(rows, packet)
            trees += proposed.read()
            return proposed

        llm.engine.worker.drafter = SimpleNamespace(propose=propose, prepare_ahead=drafter.prepare_ahead)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append(([output.token_ids for output in outputs], trees))
        assert sum(map(len, trees)) > 10
    assert found[0] == found[1]


@pytest.mark.long
def test_a_target_with_alibi_says_what_its_twin_says(tmp_path: Path) -> None:
    """Of three heads, over trees."""
    sizes = {"hidden_size": 48, "num_attention_heads": 3, "num_hidden_layers": 1}
    twin, prompt = save_baichuan(tmp_path / "target", **sizes), [5, 6, 7, 8, 9]
    save_random_head(tmp_path / "head", num_key_value_heads=3, **sizes)
    with load(tmp_path, "triton") as llm:
        output = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
        assert output.token_ids == twin.greedy(prompt, 7)
        assert output.stats.drafted > 0


@pytest.mark.long
def test_a_target_that_norms_queries_and_keys_says_what_its_twin_says(tmp_path: Path) -> None:
    twin, prompt = save_random_qwen3(tmp_path / "target", head_dim=16, num_hidden_layers=1), [5, 6, 7, 8, 9]
    save_random_head(tmp_path / "head", head_dim=16)
    with load(tmp_path, "triton") as llm:
        output = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
        theirs = twin.generate(torch.tensor([prompt]), max_new_tokens=7, min_new_tokens=7, do_sample=False)
        assert output.token_ids == theirs[0, len(prompt) :].tolist()
        assert output.stats.drafted > 0


@pytest.mark.long
@pytest.mark.parametrize("draft", ["head", "head3", "ngram"])
def test_rejection_sampling_takes_the_same_coins(folder: Path, draft: str) -> None:
    """Drawn trees, whose children are weighed, and one-hot ones; greedy rows among sampled ones."""
    prompts = [[5, 6, 7, 8, 5, 6], [20, 21, 20, 21, 20], [30, 31]]
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=6, ignore_eos=True) for i, t in enumerate((1.0, 0.0, 0.7))
    ]
    found = []
    for kernels in ("torch", "triton"):
        llm = load(folder, kernels, verify="rejection", draft="ngram" if draft == "ngram" else folder / draft)
        found.append([output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float64"}, "the triton kernels take float32, bfloat16 and float16, not torch.float64"),
        ({"shape": DraftShape(3, 2, 129)}, "a tree of 129 nodes.* support up to 128; lower nodes"),
        ({"shape": DraftShape(14, 10, 60)}, "a tree of 130 nodes, or levels times branching.* up to 128"),
        ({"kernels": "cuda"}, "kernels is 'cuda'; it must be one of auto, torch, triton"),
    ],
)
def test_unsupported_settings_are_refused(folder: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(folder, **{"kernels": "triton", **settings})  # type: ignore[arg-type]


def test_a_head_dim_that_the_kernels_were_not_made_for_is_refused(tmp_path: Path) -> None:
    save_random_llama(tmp_path / "target", head_dim=100)
    with pytest.raises(ValueError, match=r"head_dim is 100; the triton kernels support .*64, 80, 96, 128, 256; use"):
        LLM(tmp_path / "target", draft=None, dtype="float32", kernels="triton")
    assert LLM(tmp_path / "target", draft=None, dtype="float32", kernels="torch").config.kernels == "torch"


def test_a_group_that_the_kernels_were_not_made_for_is_refused() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernels = choose_kernels("triton", device, torch.float32)
    with pytest.raises(ValueError, match="32 query heads share a KV head; the triton kernels support up to 16"):
        kernels.check_model(64, 32)


def test_triton_runs_on_a_gpu_alone_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=8))
    assert choose_kernels("auto", cpu, torch.float32).name == ("native" if library_file() else "torch")
    assert choose_kernels("auto", gpu, torch.float64).name == "torch"
    assert choose_kernels("auto", gpu, torch.bfloat16).name == "triton"
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="run on cpu in Triton's interpreter alone; set TRITON_INTERPRET=1"):
        choose_kernels("triton", cpu, torch.float32)
