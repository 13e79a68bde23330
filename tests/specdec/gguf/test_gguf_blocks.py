"""GGUF's block formats computed as they are stored: numbers, tokens with and without drafts, and memory."""

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor, nn

from specdec import LLM, SamplingParams
from specdec.gguf.blocks import READERS
from specdec.gguf.file import GgufFile
from specdec.kernels.native.library import library_file
from specdec.kernels.types.quantized_tensor import QuantizedTensor
from tests.fakes import save_random_head
from tests.quantized_rows import gguf_blocks
from tests.specdec.gguf.gguf_writing import TOKENS, random_model, write_gguf

pytestmark = pytest.mark.slow

needs_library = pytest.mark.skipif(library_file() is None, reason="the native kernels are not built here")
TEXT = "hello 123, it's ünïcode\n"
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=3, prompt_logprobs=2)


def q4_k_m(name: str) -> Kind:
    """Return the types that llama.cpp's Q4_K_M mixes."""
    return Kind.Q6_K if "v_proj" in name or "down_proj" in name or "embed" in name else Kind.Q4_K


KINDS: dict[str, tuple[Kind | Callable[[str], Kind], dict[str, Any]]] = {
    "Q8_0": (Kind.Q8_0, {}),
    "Q4_0": (Kind.Q4_0, {"tie_word_embeddings": True}),
    "Q4_1": (Kind.Q4_1, {}),
    "Q4_K_M": (q4_k_m, {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "tie_word_embeddings": True}),
    # A matrix joined of quantised and plain parts.
    "mixed": (lambda name: Kind.F16 if "v_proj" in name or "embed" in name else Kind.Q8_0, {}),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    return {
        name: write_gguf(folder / f"{name}.gguf", random_model("llama", **overrides), kind)
        for name, (kind, overrides) in KINDS.items()
    }


@pytest.mark.parametrize("kind", READERS)
def test_blocks_are_those_of_the_package(kind: str) -> None:
    blocks = gguf_blocks(kind, 7, 512)
    wanted = torch.from_numpy(gguf.dequantize(blocks, Kind[kind]).copy())
    assert READERS[kind](torch.from_numpy(blocks)).dequantized().equal(wanted)


def outcome(llm: LLM) -> Any:
    (output,) = llm.generate(TEXT, PARAMS, use_tqdm=False)
    return output.token_ids, output.outputs[0].logprobs, output.prompt_logprobs


@needs_library
@pytest.mark.parametrize("name", KINDS)
def test_outputs_are_those_of_the_dequantised_weights(files: dict[str, Path], name: str) -> None:
    tokens, logprobs, _ = outcome(LLM(files[name], draft=None, dtype="float64"))
    found, own, _ = outcome(LLM(files[name], draft=None, dtype="float32", kernels="native"))
    assert found == tokens
    for one, other in zip(own, logprobs, strict=True):
        assert [entry.logprob for entry in one.values()] == pytest.approx(
            [entry.logprob for entry in other.values()], abs=2e-4
        )


@needs_library
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["Q4_1", "Q4_K_M"])
def test_drafts_change_no_bit(files: dict[str, Path], name: str, dtype: str) -> None:
    settings: dict[str, Any] = {"dtype": dtype, "kernels": "native"}
    plain = outcome(LLM(files[name], draft=None, **settings))
    for draft in ("ngram", files[name]):
        llm = LLM(files[name], draft=draft, adaptive_drafts=False, **settings)
        assert outcome(llm) == plain
    assert llm.stats().drafts_verified > 0


@needs_library
@pytest.mark.parametrize("quantization", ["none", "q8"])
def test_a_head_reads_a_packed_output_matrix(files: dict[str, Path], tmp_path: Path, quantization: str) -> None:
    sizes = {"vocab_size": len(TOKENS), "hidden_size": 64, "intermediate_size": 96}
    save_random_head(tmp_path, **sizes)
    settings: dict[str, Any] = {"dtype": "float32", "kernels": "native"}
    llm = LLM(files["Q8_0"], tmp_path, adaptive_drafts=False, quantization=quantization, **settings)
    assert outcome(llm) == outcome(LLM(files["Q8_0"], draft=None, **settings))
    assert llm.stats().drafts_verified > 0


@pytest.mark.long
@needs_library
@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_K_M"])
def test_no_dequantised_weight_is_kept(files: dict[str, Path], name: str) -> None:
    def matrices() -> list[Tensor]:
        gc.collect()
        found = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter)]
        return [one for one in found if one.is_floating_point() and one.dim() == 2 and one.shape[1] in (64, 96, 256)]

    before = {id(one) for one in matrices()}
    llm = LLM(files[name], draft=None, dtype="float32", kernels="native")
    assert [tuple(one.shape) for one in matrices() if id(one) not in before] == []
    embedding = llm.model.embed_tokens.weight
    assert isinstance(embedding, QuantizedTensor)
    assert embedding.held.quantized is None
    assert len(outcome(llm)[0]) == 16


def test_types_that_are_not_computed_as_stored_are_dequantised(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", random_model("llama"), Kind.Q5_0)
    weights = GgufFile.open(file).weights(torch.float32)
    assert not any(isinstance(weight, QuantizedTensor) for weight in weights.values())


@pytest.mark.long
def test_loading_imports_nothing_that_it_does_not_need(files: dict[str, Path]) -> None:
    """The first operation on a subclass in torch's dispatcher imports them, which takes 0.7 s."""
    code = (
        "import sys; from specdec import LLM; from specdec.gguf.file import GgufFile\n"
        "LLM(sys.argv[1], kv_cache_memory=1 << 20, adaptive_drafts=False, prefill_stretch=0)\n"
        "sys.exit(', '.join({'torch.distributed.tensor', 'sympy'} & set(sys.modules)) or 0)"
    )
    command = [sys.executable, "-c", code, str(files["Q4_1"])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
