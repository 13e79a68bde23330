"""The compiled library in every form that this processor has, and a small layer for it."""

from functools import cache

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.draft_heads.llama.rope import RopeConfig
from specdec.kernels.kernel_set import KernelSet, native_kernels
from specdec.kernels.native.library import NOT_BUILT, Library, library_file, processor_forms
from specdec.kernels.reference.noise import GumbelNoise
from specdec.kernels.types.settings import Quantization
from tests.kernels.kernel_checks import DTYPES


@cache
def library(form: str, threads: int, dtype: torch.dtype) -> Library:
    """Open the library; where it is not built, skip the test that asks for it, or the module that does on import."""
    if library_file() is None:
        pytest.skip(NOT_BUILT, allow_module_level=True)
    return Library(threads, dtype, form)


FORMS = processor_forms() or ["portable"]
# Those that multiply all weights of 4 and 8 bits in whole numbers, and those that do so with 4 bits in groups of 32,
# for which they round inputs to a byte but in float32.
INTEGER_FORMS = ("avx512_bf16", "amx")
BYTE_FORMS = ("avx2", "avx512", *INTEGER_FORMS)
# The largest relative error of one rounding.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
NOISE = GumbelNoise(torch.device("cpu"))
libraries: st.SearchStrategy[Library] = st.builds(
    library, st.sampled_from(FORMS), st.integers(1, 3), st.sampled_from(DTYPES)
)
CONFIG = LlamaConfig(
    vocab_size=10,
    hidden_size=24,
    intermediate_size=40,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=10,
    max_position=100,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kernels_of(own: Library, quantization: Quantization = "none") -> KernelSet:
    return native_kernels(own, quantization)


def rounding_of_inputs(x: Tensor, group: int) -> Tensor:
    """Return by how much each input may be rounded where it is multiplied in whole numbers of two bytes."""
    groups = _groups(x.double().abs(), group)
    return groups.amax(2, keepdim=True).expand_as(groups).flatten(1)[:, : x.shape[1]] * 2.0**-14


def as_one_byte(x: Tensor) -> Tensor:
    """Return inputs, in float64, as weights of 4 bits in groups of 32 meet them in whole numbers of one byte."""
    groups = _groups(x.float(), 32)
    largest = groups.abs().amax(2, keepdim=True).clamp_min(2.0**-97)
    # A number over a tensor would be its reciprocal, rounded, times the number.
    numbers = (groups * torch.full_like(largest, 127).div(largest)).round()
    return (numbers.double() * (largest / 127).double()).flatten(1)[:, : x.shape[1]]


def _groups(x: Tensor, group: int) -> Tensor:
    padded = F.pad(x, (0, -x.shape[1] % group))
    return padded.view(len(x), -1, group)
