"""Blocks copied between tensors of two layouts: exact, in all layers, and nothing else is touched."""

import random
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from specdec.kernels.reference import kv_copy as kv_copy_reference
from specdec.kernels.triton.kv_copy import COPY_CHUNK_SIZE, copy_between
from specdec.kernels.types.pinned_memory import host_empty
from tests.kernels.kernel_checks import BITS, DEVICE, huge
from tests.strategies import seeds

DEVICE_BLOCKS, HOST_BLOCKS = 9, 7


class Case(NamedTuple):
    """Copies: the number of blocks of `[layers, block_size, hidden]`, or of `[block_size, hidden]` for no layers."""

    layers: int
    block_size: int
    hidden: int
    copies: int
    out: bool
    dtype: torch.dtype
    seed: int


cases = st.builds(
    Case,
    st.integers(0, 3),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([1, 5, 16, 150]),
    st.integers(0, HOST_BLOCKS),
    st.booleans(),
    st.sampled_from(list(BITS)),
    seeds,
)


def bits(numbers: Tensor) -> Tensor:
    return numbers.view(BITS[numbers.dtype])


def filled(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits, NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, shape, generator=generator).to(BITS[dtype]).view(dtype).to(DEVICE)


def pinned(numbers: Tensor) -> Tensor:
    return host_empty(numbers.shape, numbers.dtype, DEVICE).copy_(numbers)


def indices(blocks: list[int]) -> Tensor:
    return torch.tensor(blocks, dtype=torch.int64, device=DEVICE)


def both(case: Case) -> tuple[Tensor, Tensor]:
    """The device's memory by block, as a cache lays it out, and the host's."""
    entry = (case.block_size, case.hidden)
    if not case.layers:
        device = filled(DEVICE_BLOCKS, *entry, dtype=case.dtype, seed=case.seed)
    else:
        device = filled(case.layers, DEVICE_BLOCKS, *entry, dtype=case.dtype, seed=case.seed).movedim(1, 0)
    host = filled(HOST_BLOCKS, *device.shape[1:], dtype=case.dtype, seed=case.seed + 1)
    return device, pinned(host)


def apply_moves(source: Tensor, target: Tensor, source_blocks: list[int], target_blocks: list[int]) -> None:
    copy_between(source, target, indices(source_blocks), indices(target_blocks))
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.long
@given(cases)
@example(Case(2, 16, 150, HOST_BLOCKS, True, torch.bfloat16, 0))
@example(Case(2, 16, 150, HOST_BLOCKS, False, torch.bfloat16, 0))
@example(Case(0, 16, COPY_CHUNK_SIZE + 1, 2, False, torch.float16, 0))
def test_blocks_go_both_ways(case: Case) -> None:
    device, host = both(case)
    generator = random.Random(case.seed)
    on_device = [generator.randrange(DEVICE_BLOCKS) for _ in range(case.copies)]
    on_host = generator.sample(range(HOST_BLOCKS), case.copies)
    source, target, old, new = device, host, on_device, on_host
    if not case.out:
        on_device = generator.sample(range(DEVICE_BLOCKS), case.copies)
        on_host = [generator.randrange(HOST_BLOCKS) for _ in range(case.copies)]
        source, target, old, new = host, device, on_host, on_device
    before, expected, plain = source.clone(), target.clone(), target.clone()
    for one, other in zip(old, new, strict=True):
        bits(expected)[other] = bits(source)[one]
    kv_copy_reference.copy_between(bits(source), bits(plain), indices(old), indices(new))
    apply_moves(source, target, old, new)
    assert torch.equal(bits(source), bits(before))
    assert torch.equal(bits(target), bits(expected))
    assert torch.equal(bits(plain), bits(expected))


def test_no_number_beside_a_block_is_written() -> None:
    """Blocks and layers of both lie apart, as columns of a wider tensor."""
    source, wide = (filled(4, 6, 2, 3, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    expected = wide.clone()
    bits(expected)[1, 1::2] = bits(source)[3, ::2]
    apply_moves(source[:, ::2], wide[:, 1::2], [3], [1])
    assert torch.equal(bits(wide), bits(expected))


def test_two_dimensions_are_one_layer() -> None:
    source, target = (filled(4, COPY_CHUNK_SIZE + 3, dtype=torch.float32, seed=seed) for seed in (0, 1))
    expected = target.clone()
    bits(expected)[[2, 0]] = bits(source)[[1, 3]]
    apply_moves(source, target, [1, 3], [2, 0])
    assert torch.equal(bits(target), bits(expected))


@pytest.mark.parametrize("out", [True, False])
@pytest.mark.parametrize(("layers", "blocks"), [(2, 2**31 // 1024 + 4), (3, 2**30 // 1024)])
def test_blocks_beyond_two_billion_numbers(layers: int, blocks: int, out: bool) -> None:
    """Within a layer, and from layer to layer; touches a few pages of 8.6 GB of address space."""
    far = huge(layers * blocks * 1024).view(layers, blocks, 4, 2, 128).movedim(1, 0)
    near = torch.zeros(3, layers, 4, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    source, target, old, new = (far, near, blocks - 1, 2) if out else (near, far, 1, blocks - 2)
    for layer in range(layers):
        source[old, layer] = 1 + layer
    apply_moves(source, target, [old], [new])
    for layer in range(layers):
        assert (target[new, layer] == 1 + layer).all()


def test_misfits_are_refused() -> None:
    tensor, blocks = torch.zeros(3, 2, 4, 5, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"source blocks \(2,\), target blocks \(1,\)"):
        copy_between(tensor, tensor.clone(), blocks, blocks[:1])
    with pytest.raises(ValueError, match="int32"):
        copy_between(tensor, tensor.clone(), blocks.int(), blocks)
    with pytest.raises(ValueError, match=r"int64, stride \(2,\)"):
        copy_between(tensor, tensor.clone(), blocks, blocks.repeat(2)[::2])
    with pytest.raises(ValueError, match=r"target \(3, 3, 4, 5\)"):
        copy_between(tensor, torch.zeros(3, 3, 4, 5, device=DEVICE), blocks, blocks)
    with pytest.raises(ValueError, match=r"float32 and .*float16"):
        copy_between(tensor, tensor.half(), blocks, blocks)
    with pytest.raises(ValueError, match="in pieces"):
        copy_between(tensor, tensor.transpose(2, 3).contiguous().transpose(2, 3), blocks, blocks)
    with pytest.raises(ValueError, match="more than one launch"):
        copy_between(torch.zeros(1, 2**16, 1, device=DEVICE), torch.zeros(2, 2**16, 1, device=DEVICE), blocks, blocks)
