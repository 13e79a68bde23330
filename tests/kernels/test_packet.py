"""Packets of numbers for a device: one copy for all, each part where a layout says, on a simulated GPU and a CPU."""

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec.kernels.types.upload import ALIGNMENT, CHUNK, Packet, PacketLayout
from tests.simulated_gpu import GPU, SimulatedTensor, simulated_gpu

CPU = torch.device("cpu")
DTYPES = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float64]


class Part(NamedTuple):
    """Numbers, and how many of them the part takes at least."""

    numbers: Tensor
    least: int


@st.composite
def parts(draw: st.DrawFn) -> Part:
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    numbers = torch.arange(torch.Size(shape).numel()).add(draw(st.integers(0, 3))).view(shape).to(dtype)
    return Part(numbers, draw(st.integers(0, 40)))


def added(packet: Packet, given: list[Part]) -> list[Tensor]:
    return [
        packet.add(part.numbers.tolist(), part.numbers.dtype, part.least).view(part.numbers.shape) for part in given
    ]


def raw(x: Tensor) -> Tensor:
    return x.raw if isinstance(x, SimulatedTensor) else x


def check(device: torch.device, before: list[Part], inside: list[Part], after: list[Part]) -> None:
    packet, layout = Packet(device), PacketLayout()
    for part in inside:
        shape = part.numbers.shape if part.numbers.numel() >= part.least else (part.least,)
        layout.add(*shape, dtype=part.numbers.dtype)
    found = added(packet, before)
    image = packet.begin(layout)
    found += added(packet, inside)
    found += added(packet, after)
    packet.send()
    for part, own in zip([*before, *inside, *after], found, strict=True):
        assert torch.equal(raw(own), part.numbers)
        assert own.dtype == part.numbers.dtype
        assert device.type == "cpu" or not own.numel() or raw(own).data_ptr() % ALIGNMENT == 0
    memory = torch.zeros(layout.size, dtype=torch.uint8, device=device)
    memory.copy_(image)
    for part, own in zip(inside, layout.views(memory), strict=True):
        flat = raw(own).flatten()
        assert torch.equal(flat[: part.numbers.numel()], part.numbers.flatten())
        assert not flat[part.numbers.numel() :].any()


some = st.lists(parts(), max_size=5)


@pytest.mark.long
@given(some, some, some)
def test_parts_arrive_as_they_were_added(before: list[Part], inside: list[Part], after: list[Part]) -> None:
    check(CPU, before, inside, after)
    with pytest.MonkeyPatch.context() as patch, simulated_gpu(patch) as gpu:
        gpu.counts.take()
        check(GPU, before, inside, after)
        assert gpu.counts.take().get("upload", 0) <= 1
        assert not gpu.waits


@given(st.lists(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=5), min_size=1, max_size=5))
def test_lists_lie_as_if_added_one_by_one(lists: list[list[int]]) -> None:
    with pytest.MonkeyPatch.context() as patch, simulated_gpu(patch) as gpu:
        for device in (CPU, GPU):
            gpu.counts.take()
            packet, layout = Packet(device), PacketLayout()
            for one in lists:
                layout.add(len(one))
            image = packet.begin(layout)
            found = packet.add_lists(*lists)
            packet.send()
            assert [own.tolist() for own in map(raw, found)] == lists
            assert gpu.counts.take().get("upload", 0) <= 1
            memory = torch.zeros(layout.size, dtype=torch.uint8, device=device)
            memory.copy_(image)
            assert [own.tolist() for own in map(raw, layout.views(memory))] == lists


def test_parts_of_any_size_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than fit into a piece of memory, and one that is larger than such a piece."""
    sizes: list[Any] = [CHUNK // 16, CHUNK // 4, 3, CHUNK // 16, 1]
    with simulated_gpu(monkeypatch):
        packet = Packet(GPU)
        found = [packet.add(list(range(size))) for size in sizes]
        packet.send()
        for own, size in zip(found, sizes, strict=True):
            assert torch.equal(raw(own), torch.arange(size))
