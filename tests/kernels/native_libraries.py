"""The compiled library in every form that this processor has, and inputs for it."""

from functools import cache

import torch
from hypothesis import strategies as st
from torch import Tensor

from specdec.kernels.native_library import Library, library_file
from specdec.verify.noise import GumbelNoise
from tests.kernels.kernel_checks import DTYPES

NOISE = GumbelNoise(torch.device("cpu"))


@cache
def library(form: str, threads: int, dtype: torch.dtype) -> Library:
    return Library(threads, dtype, form)


def _forms() -> list[str]:
    def runs(form: str) -> bool:
        try:
            return library(form, 1, torch.float32).form == form
        except ValueError:
            return False

    return [form for form in ("portable", "avx2", "avx512") if runs(form)] if library_file() else ["portable"]


FORMS = _forms()
libraries: st.SearchStrategy[Library] = st.builds(
    library, st.sampled_from(FORMS), st.integers(1, 3), st.sampled_from(DTYPES)
)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
