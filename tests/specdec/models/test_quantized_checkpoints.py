"""Quantised checkpoint folders: logits of the weights that they say, drafts, memory, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from specdec import LLM, SamplingParams
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.kernels.native.library import library_file
from specdec.kernels.types.quantized_tensor import QuantizedTensor
from specdec.models.checkpoint import read_weights
from specdec.models.llama import load_llama
from tests.kernel_sets import TORCH
from tests.quantized_checkpoints import BLOCK, FORMATS, quantize_folder
from tests.specdec.chunked_pass import chunked_logits
from tests.specdec.saved_llama import edit_tensors, save_llama

CPU = torch.device("cpu")
PROMPT = list(range(5, 29))
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0, prompt_logprobs=0)
needs_library = pytest.mark.skipif(library_file() is None, reason="the native kernels are not built here")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "target"
    save_llama(folder)
    return folder


def outcome(llm: LLM) -> tuple[list[int], list[float]]:
    """Return the output, and the log-probabilities of the prompt's and the output's tokens."""
    (output,) = llm.generate([PROMPT], PARAMS, use_tqdm=False)
    entries = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
    tokens = [*PROMPT[1:], *output.token_ids]
    values = [entry[token].logprob for entry, token in zip(entries, tokens, strict=True) if entry]
    return list(output.token_ids), values


@torch.no_grad()
def expected(plain: Path, weights: dict[str, Tensor]) -> tuple[list[int], list[float]]:
    """Return the same by transformers from the weights in float64."""
    model = LlamaForCausalLM.from_pretrained(plain, dtype=torch.float64)
    model.load_state_dict(weights)
    found = model.generate(
        torch.tensor([PROMPT]), do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0
    )
    logits = model(found).logits[0, :-1].log_softmax(-1)
    values = logits.gather(1, found[0, 1:, None]).flatten().tolist()
    return found[0, len(PROMPT) :].tolist(), values


@pytest.mark.parametrize("name", FORMATS)
def test_outputs_are_those_of_the_weights_that_are_said(plain: Path, tmp_path: Path, name: str) -> None:
    weights = quantize_folder(plain, tmp_path / "target", name)
    tokens, values = expected(plain, weights)
    found, own = outcome(LLM(tmp_path / "target", draft=None, dtype="float64"))
    assert found == tokens
    # Dequantised weights are rounded to float32 once or twice.
    assert own == pytest.approx(values, abs=1e-5)
    unquantized = expected(plain, load_file(plain / "model.safetensors"))[1]
    assert own[:8] != pytest.approx(unquantized[:8], abs=1e-3 if "8" in name else 1e-2)
    if library_file() is not None:
        found, own = outcome(LLM(tmp_path / "target", draft=None, dtype="float32", kernels="native"))
        assert found == tokens
        assert own == pytest.approx(values, abs=2e-4)


def test_transformers_says_the_same_of_blocks(plain: Path, tmp_path: Path) -> None:
    """Its own dequantisation, where it needs no other package."""
    from transformers import FineGrainedFP8Config

    folder = tmp_path / "target"
    quantize_folder(plain, folder, "fp8-blocks")
    config = FineGrainedFP8Config(dequantize=True, weight_block_size=BLOCK)
    theirs = LlamaForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32).state_dict()
    for name, weight in read_weights(folder, torch.float32).items():
        own = weight.dequantized(torch.float32) if isinstance(weight, QuantizedTensor) else weight
        full = name if name == "lm_head.weight" else f"model.{name}"
        torch.testing.assert_close(own.float(), theirs[full].float(), rtol=1e-6, atol=0)


@needs_library
@pytest.mark.parametrize("name", ["fp8-blocks", "awq", "int8"])
def test_a_quantised_model_drafts(plain: Path, tmp_path: Path, name: str) -> None:
    quantize_folder(plain, tmp_path / "small", name)
    settings: dict[str, Any] = {"dtype": "float32", "kernels": "native", "adaptive_drafts": False}
    llm = LLM(plain, draft=tmp_path / "small", **settings)
    assert outcome(llm) == outcome(LLM(plain, draft=None, **settings))
    assert llm.stats().drafts_verified > 0


def test_a_bias_of_zeros_that_gptq_adds_is_dropped(plain: Path, tmp_path: Path) -> None:
    quantize_folder(plain, tmp_path / "target", "gptq")
    model = load_llama(tmp_path / "target", torch.float32, CPU, TORCH)

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.bias"] = torch.zeros(48)
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)

    edit_tensors(tmp_path / "target", add)
    again = load_llama(tmp_path / "target", torch.float32, CPU, TORCH)
    assert dict(again.weights.named_parameters()).keys() == dict(model.weights.named_parameters()).keys()


def test_scales_of_queries_and_attention_weights_are_left_out(plain: Path, tmp_path: Path) -> None:
    folder, prompt = tmp_path / "target", list(range(8))
    quantize_folder(plain, folder, "fp8")

    def logits(*names: str) -> Tensor:
        scales = {f"model.layers.{layer}.self_attn.{name}": torch.tensor(0.1) for layer in (0, 1) for name in names}
        edit_tensors(folder, lambda tensors: tensors.update(scales))
        return chunked_logits(folder, torch.float32, prompt, (len(prompt),))

    assert torch.equal(logits("k_scale", "v_scale"), logits("q_scale", "prob_scale", "attn.q_scale"))


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bitsandbytes": (
        "awq",
        {"quant_method": "bitsandbytes"},
        r"quant_method 'bitsandbytes' is not supported; supported",
    ),
    "mxfp4": ("awq", {"quant_method": "mxfp4"}, r"quant_method 'mxfp4' is not supported"),
    "no method": ("awq", {"quant_method": None}, r"quant_method None is not supported"),
    "awq gemv": ("awq", {"version": "gemv"}, r"version = 'gemv' is not supported; supported: 'gemm'"),
    "awq 3 bits": ("awq", {"bits": 3}, r"bits = 3 is not supported; supported: 4"),
    "awq without zeros": ("awq", {"zero_point": False}, r"zero_point = False is not supported; supported: True"),
    "group": ("gptq", {"group_size": 12}, r"group_size = 12 is not supported; it must be -1 or a multiple of 8"),
    "gptq 3 bits": ("gptq", {"bits": 3}, r"bits = 3 is not supported; supported: 4, 8"),
    "marlin": ("gptq", {"is_marlin_format": True}, r"is_marlin_format = True is not supported; supported: False"),
    "dynamic": ("gptq", {"dynamic": {"-:lm_head": {}}}, r"dynamic = \{'-:lm_head': \{\}\} is not supported"),
    "e5m2": ("fp8", {"fmt": "e5m2"}, r"fmt = 'e5m2' is not supported; supported: 'e4m3'"),
    "block": ("fp8-blocks", {"weight_block_size": 128}, r"weights in blocks of 128 are not supported"),
    "nvfp4": ("int8", {"format": "nvfp4-pack-quantized"}, r"group_0: format = 'nvfp4-pack-quantized' is not supported"),
    "no groups": ("int8", {"config_groups": {}}, r"config_groups = \{\} is not supported"),
    "transforms": ("int8", {"transform_config": {"r1": 1}}, r"transform_config = \{'r1': 1\} is not supported"),
    "sparse": ("int8", {"sparsity_config": {"format": "marlin_24"}}, r"sparsity_config with format 'marlin_24'"),
}
REFUSED_GROUPS: dict[str, tuple[dict[str, Any], str]] = {
    "w8a8": (
        {"input_activations": {"type": "int", "num_bits": 8}},
        r"input_activations .* supported are none and 8-bit",
    ),
    "outputs": ({"output_activations": {"num_bits": 8}}, r"output_activations = .* is not supported; supported: none"),
    "fp4": ({"weights": {"type": "float", "num_bits": 4}}, r"weights\.num_bits = 4 is not supported; supported: 8"),
    "2 bits": ({"weights": {"type": "int", "num_bits": 2}}, r"weights\.num_bits = 2 is not supported; supported: 4, 8"),
    "actorder": (
        {"weights": {"type": "int", "num_bits": 4, "strategy": "group", "actorder": "group"}},
        r"weights\.actorder = 'group' is not supported",
    ),
}


def refused(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as raised:
        load_llama(folder, torch.float32, CPU, TORCH)
    assert "\n" not in str(raised.value)
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize("case", [*REFUSED, *REFUSED_GROUPS])
def test_other_quantisations_are_refused_by_name(plain: Path, tmp_path: Path, case: str) -> None:
    folder = tmp_path / "target"
    name, change, message = REFUSED[case] if case in REFUSED else ("int8", {}, REFUSED_GROUPS[case][1])
    quantize_folder(plain, folder, name)
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] |= change
    if case in REFUSED_GROUPS:
        settings["quantization_config"]["config_groups"]["group_0"] |= REFUSED_GROUPS[case][0]
    (folder / "config.json").write_text(json.dumps(settings))
    refused(folder, message)


Q = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "part", "change", "message"),
    [
        (
            "fp8",
            "weight_scale",
            None,
            rf"{Q[6:]}: it has no weight_scale or weight_scale_inv beside weight, input_scale",
        ),
        (
            "fp8-blocks",
            "weight_scale_inv",
            lambda each: each[:1],
            r"q_proj: scales of shape \[1, 2\] do not fit a weight",
        ),
        ("awq", "qzeros", None, r"q_proj: it has no qzeros beside qweight, scales"),
        ("awq", "scales", lambda each: each[:1], r"q_proj: its tensors do not fit groups of 16: .*scales \[1, 32\]"),
        ("awq", "qweight", lambda each: each.float(), r"q_proj: packed numbers are torch.float32 .* must be int32"),
        ("gptq", "g_idx", lambda each: each.flip(0), r"q_proj: .*in another order than their own \(desc_act\)"),
        ("packed-4", "weight_shape", lambda each: each * 2, r"q_proj: words \[32, 4\] do not hold a weight of shape"),
        ("packed-4-zeros", "weight_zero_point", lambda each: each[:2], r"q_proj: zeros of shape \[16, 2\] do not fit"),
        ("packed-4", "weight_g_idx", lambda _: torch.arange(32), r"q_proj: .*\(actorder\), which is not supported"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    plain: Path, tmp_path: Path, name: str, part: str, change: Any, message: str
) -> None:
    folder = tmp_path / "target"
    quantize_folder(plain, folder, name)
    tensors = load_file(folder / "model.safetensors")
    given = tensors.pop(f"{Q}.{part}", None)
    if change is not None:
        tensors[f"{Q}.{part}"] = change(given).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    refused(folder, message)
