"""A simulated GPU: the CPU computes what runs on it, and operations that a GPU would refuse raise an error.

Tensors "on the GPU" report the device `cuda:1` and hold their numbers in a CPU tensor. Mixing the two kinds fails as it
would on a GPU. Operations that make the host wait are recorded. A CUDA graph is a tape of launches: a replay runs them
again on the same memory without any of the captured Python code, so values read at the capture stay as they were.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime import interpreter

from tests.simulated_streams import SimulatedEvent, SimulatedStream, Streams

# Not the first device, so that code that forgets to name the device is found.
GPU = torch.device("cuda", 1)
CPU = torch.device("cpu")
# Operations that give the host numbers, or need numbers to know a shape.
READERS = {
    "tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__",
    "equal", "allclose", "nonzero", "unique", "masked_select", "argwhere", "bincount", "is_nonzero",
}  # fmt: skip
# Operations whose result shares the memory of a pinned tensor.
VIEWS = {Tensor.view, Tensor.flatten, Tensor.__getitem__, Tensor.T.__get__, Tensor.unbind}  # type: ignore[attr-defined]


class SimulatedTensor(torch.Tensor):
    """A tensor on the GPU. The CPU tensor `raw` holds its numbers."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> "SimulatedTensor":
        made: SimulatedTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, raw.shape, strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype, device=GPU
        )
        made.raw = raw
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was reached without the GPU")


class Launch(NamedTuple):
    """An operation that a graph repeats at each replay."""

    work: Callable[..., Any]
    args: tuple[Any, ...]
    settings: dict[str, Any]
    made: dict[int, Tensor]


class SimulatedGraph:
    """A tape of launches."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def replay(self) -> None:
        with torch._C.DisableTorchFunction():
            for launch in self.launches:
                found = _tensors(launch.work(*launch.args, **launch.settings))
                for place, mine in launch.made.items():
                    mine.copy_(found[place])

    def forget(self) -> None:
        """Overwrite what the capture computed: a real capture computes nothing before its first replay."""
        for made in (made for launch in self.launches for made in launch.made.values()):
            made.fill_(float("nan") if made.is_floating_point() else True if made.dtype == torch.bool else 1 << 20)


class SimulatedGPU(TorchFunctionMode):
    """Handles every torch function that is called while it is entered.

    Attributes:
        waits: operations that made the host wait, each with the module that called it.
        is_current: whether kernels and events without a device go to this one.
        streams: its streams.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self._tape: SimulatedGraph | None = None
        self.is_current, self.streams = False, Streams()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.device, torch._C._nn._parse_to):
            # They handle devices, not tensors.
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        given = tree_leaves((args, kwargs))
        on_gpu = [leaf for leaf in given if isinstance(leaf, SimulatedTensor)]
        if name == "__get__":
            name = func.__self__.__name__  # type: ignore[attr-defined]
            known = {"device": GPU, "is_cuda": True, "is_cpu": False}
            if on_gpu and name in known:
                return known[name]
        if name == "_has_compatible_shallow_copy_type" and on_gpu:
            return False
        if name in ("pin_memory", "is_pinned"):
            raise AssertionError(f"{name} of a tensor; ask for pinned memory where it is made")
        goes_up = any(_is_gpu(leaf) for leaf in given)
        if not on_gpu and not goes_up:
            return self._on_host(func, args, kwargs)
        others = [leaf for leaf in given if isinstance(leaf, Tensor) and not isinstance(leaf, SimulatedTensor)]
        if name in ("copy_", "to", "__setitem__"):
            self._note_copy(name, args, kwargs, goes_up=goes_up)
        elif any(other.ndim for other in others) and not name.endswith("_like"):
            raise RuntimeError(f"{name}: expected all tensors on the same device, found {GPU} and cpu")
        if goes_up and name in ("tensor", "as_tensor"):
            self.note(f"{name} from pageable memory")
        if on_gpu and self._waits(name, args, kwargs):
            self.note(name)
        comes_down = name in ("cpu", "numpy") or (name == "to" and any(_is_cpu(leaf) for leaf in given))
        mine = {id(one.raw): one for one in on_gpu}
        plain, settings = tree_map(_lowered, args), tree_map(_lowered, kwargs)
        settings.pop("pin_memory", None)
        with torch._C.DisableTorchFunction():
            found = func(*plain, **settings)
            if not _tensors(found):
                return found
            if comes_down:
                return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, found)
            if self._tape is not None:
                self._tape.launches.append(Launch(func, plain, settings, _new(found, on_gpu)))
            return tree_map(lambda leaf: mine[id(leaf)] if id(leaf) in mine else _raised(leaf), found)

    @property
    def is_capturing(self) -> bool:
        return self._tape is not None

    def launch(self, work: Callable[..., Any], args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        """Run a Triton kernel in the interpreter."""
        for leaf in tree_leaves((args, settings)):
            if isinstance(leaf, Tensor) and not isinstance(leaf, SimulatedTensor) and not _is_pinned(leaf):
                raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        assert self.is_current, "a kernel goes to the current device, which is another"
        plain, named = tree_map(_lowered, args), tree_map(_lowered, settings)
        if self._tape is not None:
            self._tape.launches.append(Launch(work, plain, named, {}))

        def run() -> Any:
            with torch._C.DisableTorchFunction():
                return work(*plain, **named)

        return self.streams.current.launch(run)

    @contextmanager
    def capture(self, graph: SimulatedGraph, pool: object) -> Iterator[None]:
        """Replace `torch.cuda.graph`."""
        assert self._tape is None
        assert pool == torch.cuda.graph_pool_handle()
        self._tape = graph
        try:
            yield
        finally:
            self._tape = None
        graph.forget()

    @contextmanager
    def be_current(self, device: object) -> Iterator[None]:
        """Replace `torch.cuda.device`."""
        assert device == GPU
        before, self.is_current = self.is_current, True
        try:
            yield
        finally:
            self.is_current = before

    def event(self, *, enable_timing: bool = False) -> SimulatedEvent:  # noqa: ARG002
        """Replace `torch.cuda.Event`."""
        return SimulatedEvent(self, self.streams)

    def stream(self, device: object = None) -> SimulatedStream:
        """Replace `torch.cuda.Stream`."""
        assert device in (GPU, None)
        return SimulatedStream(self.streams)

    def synchronize(self, device: object = None) -> None:
        """Replace `torch.cuda.synchronize`."""
        assert device == GPU or self.is_current
        self.note("synchronize")

    def _on_host(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pinned = kwargs.pop("pin_memory", False) or any(
            _is_pinned(leaf) for leaf in tree_leaves(args[:1]) if func in VIEWS
        )
        found = func(*args, **kwargs)
        if pinned:
            for one in _tensors(found):
                one.is_in_pinned_memory = True  # type: ignore[attr-defined]
        return found

    def _note_copy(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, goes_up: bool) -> None:
        """Record a copy between host and device that makes the host wait, and refuse it in a capture."""
        source = args[0] if name == "to" else args[-1]
        if not isinstance(source, Tensor):
            return
        up = not isinstance(source, SimulatedTensor) and (goes_up or isinstance(args[0], SimulatedTensor))
        down = isinstance(source, SimulatedTensor) and not isinstance(args[0], SimulatedTensor)
        if up and source.numel() and source.ndim and not (_is_pinned(source) and (kwargs.get("non_blocking"))):
            self.note(f"{name} from pageable memory")
        if down:
            self.note(f"{name} to the host")
        if up and self._tape is not None:
            raise AssertionError(f"{name} from the host while a graph is captured")

    def _waits(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if name == "repeat_interleave":
            return isinstance(args[1], Tensor) and "output_size" not in kwargs
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            # A list becomes a tensor in pageable memory; the size of a masked selection depends on the mask's values.
            return any(isinstance(one, list) or (isinstance(one, Tensor) and one.dtype == torch.bool) for one in index)
        return name in READERS or (name == "to" and any(_is_cpu(leaf) for leaf in tree_leaves((args, kwargs))))

    def note(self, what: str) -> None:
        """Record that the host waits, and who lets it."""
        if self._tape is not None:
            raise AssertionError(f"{what} while a graph is captured")
        frame = sys._getframe(1)
        while not frame.f_globals["__name__"].startswith("specdec.") and frame.f_back is not None:
            frame = frame.f_back
        self.waits.append(f"{frame.f_globals['__name__']}: {what}")


@contextmanager
def simulated_gpu(patch: pytest.MonkeyPatch) -> Iterator[SimulatedGPU]:
    """Make `torch.cuda` and Triton's interpreter use a simulated GPU."""
    gpu = SimulatedGPU()
    execute = interpreter.GridExecutor.__call__

    def launch(executor: interpreter.GridExecutor, *args: Any, **settings: Any) -> Any:
        return gpu.launch(lambda *a, **s: execute(executor, *a, **s), args, settings)

    patch.setattr(interpreter.GridExecutor, "__call__", launch)
    answers = {
        "is_available": True,
        "is_bf16_supported": True,
        "get_device_properties": SimpleNamespace(multi_processor_count=132, major=9),
        "mem_get_info": (60 << 20, 64 << 20),
        "max_memory_reserved": 4 << 20,
        "memory_reserved": 4 << 20,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "graph_pool_handle": (0, 1),
        "current_device": GPU.index,
    }
    for name, answer in answers.items():
        patch.setattr(torch.cuda, name, Mock(return_value=answer))
    patch.setattr(torch.cuda, "synchronize", Mock(side_effect=gpu.synchronize))
    patch.setattr(torch.cuda, "device", gpu.be_current)
    patch.setattr(torch.cuda, "Event", gpu.event)
    patch.setattr(torch.cuda, "Stream", gpu.stream)
    patch.setattr(torch.cuda, "current_stream", lambda: gpu.streams.current)
    patch.setattr(torch.cuda, "stream", gpu.streams.choose)
    patch.setattr(torch.cuda, "CUDAGraph", SimulatedGraph)
    patch.setattr(torch.cuda, "graph", gpu.capture)
    with gpu:
        yield gpu


def _lowered(leaf: Any) -> Any:
    if isinstance(leaf, SimulatedTensor):
        return leaf.raw
    return CPU if _is_gpu(leaf) else leaf


def _raised(leaf: Any) -> Any:
    return SimulatedTensor(leaf) if isinstance(leaf, Tensor) else leaf


def _tensors(found: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


def _new(found: Any, given: list[SimulatedTensor]) -> dict[int, Tensor]:
    """Return the results that have memory of their own, by index."""
    held = {one.raw.untyped_storage().data_ptr() for one in given}
    return {i: one for i, one in enumerate(_tensors(found)) if one.untyped_storage().data_ptr() not in held}


def _is_gpu(leaf: Any) -> bool:
    return (isinstance(leaf, torch.device) and leaf.type == "cuda") or (isinstance(leaf, str) and leaf[:4] == "cuda")


def _is_cpu(leaf: Any) -> bool:
    return leaf == CPU or leaf == "cpu" if isinstance(leaf, torch.device | str) else False


def _is_pinned(tensor: Tensor) -> bool:
    return getattr(tensor, "is_in_pinned_memory", False)
