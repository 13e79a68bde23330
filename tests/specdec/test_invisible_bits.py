"""Promise 1 in its strong form: with the native kernels the logits too are those of plain decoding, bit for bit.

With weights or a cache in 8 bits, or a quantised checkpoint, plain decoding is that with the same.
"""

from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import LLM, DraftShape, SamplingParams
from specdec.core.outputs import RequestOutput
from specdec.kernels.native.library import library_file
from specdec.kernels.types.settings import Quantization
from tests.coded_cache import KV_CACHE_DTYPES
from tests.fakes import RandomDrafter
from tests.profiles import num_cases
from tests.specdec.drawn_requests import Arrival, arrivals, cut, run, shapes
from tests.specdec.world import BLOCKS, STORED, VOCAB, World

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(library_file() is None, reason="the native kernels are not built here"),
]
CASES = num_cases(40)


def outcome(output: RequestOutput) -> object:
    """Return all that a user sees of the model's numbers."""
    return (
        [(one.token_ids, one.text, one.finish_reason, one.logprobs) for one in output.outputs],
        output.prompt_logprobs,
        output.choices,
    )


@pytest.mark.long
@settings(max_examples=CASES)
@given(
    cases=arrivals,
    shape=shapes,
    drafter=st.sampled_from(["none", "eagle", "eagle3", *BLOCKS, "llama", "random", "random"]),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    quantization=st.sampled_from(get_args(Quantization)),
    kv_cache_dtype=st.sampled_from(KV_CACHE_DTYPES),
    draft_kv_cache_dtype=st.sampled_from([None, *KV_CACHE_DTYPES]),
    stored=st.sampled_from([None, None, "alibi", *STORED]),
    seats=st.integers(1, 5),
    chunk=st.integers(5, 64),
    blocks=st.integers(20, 60),
    threads=st.integers(1, 2),
    seed=st.integers(0, 1000),
)
def test_logits_are_those_of_plain_decoding(
    world: World,
    cases: list[Arrival],
    shape: DraftShape,
    drafter: str,
    dtype: str,
    quantization: Quantization,
    kv_cache_dtype: str,
    draft_kv_cache_dtype: str | None,
    stored: str | None,
    seats: int,
    chunk: int,
    blocks: int,
    threads: int,
    seed: int,
) -> None:
    if stored is not None:
        world = world.alibi if stored == "alibi" else world.stored(stored)
    cases = [case._replace(params=cut(case.params, chunk - seats)) for case in cases]
    loras: dict[str, Any] = {"enable_lora": any(case.adapter for case in cases), "max_lora_rank": 17}
    plain = LLM(
        world.folder / "target",
        draft=None,
        dtype=dtype,
        kernels="native",
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        threads=1,
        max_num_seqs=1,
        max_model_len=64,
        **loras,
    )
    expected = [
        outcome(plain.generate([case.prompt], case.params, use_tqdm=False, lora_request=world.adapter(case.adapter))[0])
        for case in cases
    ]
    llm = LLM(
        world.folder / "target",
        world.draft(drafter),
        dtype=dtype,
        kernels="native",
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        draft_kv_cache_dtype=None if drafter == "none" else draft_kv_cache_dtype,
        threads=threads,
        shape=shape,
        max_num_seqs=seats,
        max_num_batched_tokens=chunk,
        adaptive_drafts=False,
        prefill_stretch=0,
        max_model_len=64,
        kv_cache_memory=blocks * 8 * 3 * 2 * 16 * 8 * 2,
        block_size=8,
        **loras,
    )
    if drafter == "random":
        llm.engine.worker.drafter = RandomDrafter(VOCAB, seed)
    assert [outcome(group.output()) for group in run(llm, cases, world=world)] == expected


@pytest.mark.parametrize(
    ("quantization", "kv_cache_dtype"),
    [*((weights, "auto") for weights in get_args(Quantization)), *(("none", kv) for kv in ("int8", "fp8_e4m3"))],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_long_prompt_is_the_same_in_any_chunks(
    world: World, dtype: str, quantization: Quantization, kv_cache_dtype: str
) -> None:
    prompt = torch.randint(0, VOCAB, (250,), generator=torch.Generator().manual_seed(0)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, prompt_logprobs=2, ignore_eos=True)
    outcomes = []
    for chunk in (8, 37, 512):
        llm = LLM(
            world.folder / "target",
            draft=None,
            dtype=dtype,
            kernels="native",
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            max_num_seqs=4,
            max_num_batched_tokens=chunk,
            prefill_stretch=0,
        )
        outcomes.append(outcome(llm.generate([prompt], params, use_tqdm=False)[0]))
    assert outcomes[1:] == outcomes[:1] * 2
