"""`quantization`: whose weights are in 8 bits, what stays in memory, where they are refused."""

import gc
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from specdec import LLM, SamplingParams
from specdec.kernels.kernel_set import choose_kernels
from specdec.kernels.native.library import library_file
from tests.quantized import dequantized
from tests.specdec.saved_llama import edit_tensors, save_llama
from tests.specdec.world import World

pytestmark = pytest.mark.slow

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


@pytest.mark.long
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


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"kernels": "torch"}, "not for the torch kernels; use kernels 'native'"),
        ({"kernels": "triton"}, "not for the triton kernels; use kernels 'native'"),
        # Which the native kernels refuse as well.
        ({"dtype": "float64"}, "in float32, bfloat16 or float16, not torch.float64; use one of these"),
    ],
)
def test_other_kernels_refuse_it(settings: dict[str, Any], remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.kernels.kernel_set.library_file", lambda: Path("built"))
    wanted = f"quantization 'q8' is for the native kernels on a CPU, {remedy}, or quantization 'none'"
    with pytest.raises(ValueError, match=f"^{re.escape(wanted)}$"):
        LLM(draft=None, quantization="q8", **settings)


def test_on_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=9))
    with pytest.raises(ValueError, match=r"not for the triton kernels; use device 'cpu', or quantization 'none'$"):
        choose_kernels("auto", torch.device("cuda"), torch.float32, None, "q8")


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
