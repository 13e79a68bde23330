"""`quantization`, `draft_quantization`: whose weights are in 8 bits, what stays in memory, where they are refused."""

import gc
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor, nn

from specdec import LLM, SamplingParams
from specdec.building.block_identity import block_keys
from specdec.draft_heads.drafting.tree_drafter import TreeDrafter
from specdec.kernels.native.library import NUMBER_KINDS, library_file
from specdec.kernels.native.packed_matrix import PackedMatrix
from tests.quantized import dequantized
from tests.specdec.saved_llama import edit_tensors, save_llama
from tests.specdec.world import World

needs_library = pytest.mark.skipif(library_file() is None, reason="the native kernels are not built here")
PROMPTS = [list(range(5, 15)), list(range(3, 40)), [7, 9, 11]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, logprobs=5, prompt_logprobs=3, ignore_eos=True)


def logprobs(llm: LLM) -> list[Any]:
    """Return each token's log-probability, of the prompts and of what follows."""
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    prompts = [
        one[token].logprob
        for o in outputs
        for one, token in zip((o.prompt_logprobs or [])[1:], o.prompt_token_ids[1:], strict=True)
        if one
    ]
    return prompts + [
        entries[token].logprob
        for o in outputs
        for entries, token in zip(o.outputs[0].logprobs or [], o.token_ids, strict=True)
    ]


@needs_library
@pytest.mark.parametrize("tied", [False, True])
def test_every_matrix_is_in_8_bits_and_no_embedding(tmp_path: Path, tied: bool) -> None:
    """The model is the one whose matrices, lm_head included, are rounded on disk; the embedding is not."""
    given, rounded = tmp_path / "given", tmp_path / "rounded"
    save_llama(given, tie_word_embeddings=tied, initializer_range=0.2)
    save_llama(rounded, initializer_range=0.2)

    def change(tensors: dict[str, Tensor]) -> None:
        tensors.update(load_file(given / "model.safetensors"))
        if tied:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        for name, tensor in tensors.items():
            if tensor.dim() == 2 and "embed_tokens" not in name:
                tensors[name] = dequantized(tensor.float())

    edit_tensors(rounded, change)
    exact = logprobs(LLM(rounded, draft=None, dtype="float64"))
    found = logprobs(LLM(given, draft=None, dtype="float32", kernels="native", quantization="q8"))
    unrounded = logprobs(LLM(given, draft=None, dtype="float64"))
    assert found == pytest.approx(exact, abs=2e-5)
    assert unrounded != pytest.approx(exact, abs=1e-3)


@needs_library
@pytest.mark.parametrize("draft", ["none", "eagle", "eagle3", "llama"])
def test_no_weight_is_kept_beside_its_packed_form(world: World, draft: str) -> None:
    def matrices() -> list[Tensor]:
        gc.collect()
        found = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter)]
        # Weights here have 32 to 144 rows; the cache of features has more.
        return [one for one in found if one.is_floating_point() and one.dim() == 2 and 32 <= len(one) <= 144]

    before = {id(one) for one in matrices()}
    llm = LLM(world.folder / "target", world.draft(draft), dtype="float32", kernels="native", quantization="q8")
    found = [one for one in matrices() if id(one) not in before]
    # The embeddings of target and draft model are looked up as they are.
    assert {tuple(one.shape) for one in found} == {tuple(llm.model.embed_tokens.weight.shape)}
    assert len({one.untyped_storage().data_ptr() for one in found}) <= (1 if draft == "none" else 2)
    assert llm.generate([PROMPTS[0]], PARAMS, use_tqdm=False)[0].token_ids


@needs_library
@pytest.mark.parametrize(("draft_vocab", "draft_rank"), [(40, None), (None, 8), (40, 8)])
def test_readouts_of_few_tokens_draft_with_8_bits(
    world: World, draft_vocab: int | None, draft_rank: int | None
) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "kernels": "native", "quantization": "q8"}
    plain = LLM(world.folder / "target", draft=None, **settings)
    few = {"draft_vocab": draft_vocab, "draft_rank": draft_rank, "adaptive_drafts": False}
    llm = LLM(world.folder / "target", world.draft("eagle"), **few, **settings)
    assert logprobs(llm) == logprobs(plain)
    assert llm.stats().drafts_verified > 0


@needs_library
@pytest.mark.parametrize(
    ("draft", "target_weights", "draft_weights"),
    [("eagle3", "none", "q8"), ("dspark", "none", "q8"), ("llama", "none", "q8"), ("eagle", "q8", "none")],
)
def test_the_draft_model_can_have_other_weights_than_the_target(
    world: World, draft: str, target_weights: str, draft_weights: str
) -> None:
    def kinds(**settings: Any) -> tuple[list[int], LLM]:
        packed = list[int]()

        class Watched(PackedMatrix):
            def __init__(self, *args: Any, **keywords: Any) -> None:
                super().__init__(*args, **keywords)
                packed.append(self.fields.kind)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("specdec.kernels.native.operations.PackedMatrix", Watched)
            llm = LLM(
                world.folder / "target", dtype="float32", kernels="native", quantization=target_weights, **settings
            )
        return packed, llm

    of_target, plain = kinds(draft=None)
    of_both, llm = kinds(draft=world.draft(draft), draft_quantization=draft_weights, adaptive_drafts=False)
    eight = NUMBER_KINDS["int8"]
    assert {kind == eight for kind in of_target} == {target_weights == "q8"}
    of_draft = Counter(of_both) - Counter(of_target)
    assert of_draft
    assert {kind == eight for kind in of_draft} == {draft_weights == "q8"}
    assert logprobs(llm) == logprobs(plain)
    assert llm.stats().drafts_verified > 0


@needs_library
def test_blocks_of_a_draft_model_in_8_bits_have_keys_of_their_own(world: World) -> None:
    """Its keys and values are others; the target's are the same."""

    def keys(**settings: Any) -> list[str]:
        llm = LLM(world.folder / "target", world.draft("eagle3"), dtype="float32", kernels="native", **settings)
        worker = llm.engine.worker
        assert isinstance(worker.drafter, TreeDrafter)
        found = block_keys(llm.config, worker.cache, worker.drafter.head)
        return [found(part, b"") for part in ("target", "head")]

    whole, eight = keys(), keys(draft_quantization="q8")
    assert whole == keys(draft_quantization="none")
    assert whole[0] == eight[0]
    assert whole[1] != eight[1]


def test_other_kernels_refuse_it_for_drafts(world: World) -> None:
    with pytest.raises(ValueError, match=r"^draft_quantization 'q8' is for the native kernels on a CPU, not for the "):
        LLM(world.folder / "target", world.draft("eagle"), kernels="torch", draft_quantization="q8")


def test_without_a_draft_model_it_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match=r"^draft_quantization is 'q8'; it is for a draft model, and draft is 'ngram'"):
        LLM(world.folder / "target", "ngram", draft_quantization="q8")


@pytest.mark.parametrize("settings", [{"kernels": "torch"}, {"kernels": "triton"}, {"dtype": "float64"}])
def test_other_kernels_refuse_it(settings: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"quantization 'q8' is for the native kernels on a CPU[^\n]*quantization 'none'$"
    ):
        LLM(draft=None, quantization="q8", **settings)


def test_without_the_library_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.kernels.kernel_set.library_file", lambda: None)
    with pytest.raises(ValueError, match=r"quantization 'q8' is[^\n]*not built: install a C compiler[^\n]*'none'$"):
        LLM(draft=None, quantization="q8", dtype="float32")


@needs_library
def test_the_log_says_that_outputs_change(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        LLM(world.folder / "target", draft=None, dtype="float32")
        assert "8-bit" not in caplog.text
        LLM(world.folder / "target", draft=None, dtype="float32", quantization="q8")
    assert "8-bit weights: the model's outputs change" in caplog.text
