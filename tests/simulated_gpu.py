"""Two simulated GPUs: the CPU computes what runs on them, and operations that GPUs would refuse raise an error.

Tensors "on a GPU" report its device and hold their numbers in a CPU tensor. Mixing devices fails as it would on GPUs.
Operations that make the host wait are recorded. A CUDA graph is a tape of launches: a replay runs them again on the
same memory without any of the captured Python code, so values read at the capture stay as they were.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime import interpreter

from tests.profiles import IS_NIGHTLY
from tests.simulated_counts import Counts, with_counts
from tests.simulated_graphs import Capture, Launch, SimulatedGraph, tensors_of
from tests.simulated_memory import Memory, Pool, Workspace, is_product
from tests.simulated_pinned import SimulatedPinned
from tests.simulated_streams import Downloads, SimulatedEvent, SimulatedStream, Streams

# Not the first device, so that code that forgets to name the device is found.
GPU = torch.device("cuda", 1)
NUM_GPUS = 2
BUCKETS = ((2, 1), (8, 4), (32, 12)) if IS_NIGHTLY else ((1, 1), (8, 4), (16, 8))
CPU = torch.device("cpu")
# Operations that give the host numbers, or need numbers to know a shape.
READERS = {
    "tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__",
    "equal", "allclose", "nonzero", "unique", "masked_select", "argwhere", "bincount", "is_nonzero",
}  # fmt: skip
# Operations that allocate and write nothing.
EMPTY = {"empty", "empty_like", "empty_strided", "new_empty"}


class SimulatedTensor(torch.Tensor):
    """A tensor on a GPU. The CPU tensor `raw` holds its numbers."""

    raw: Tensor
    gpu: torch.device

    @staticmethod
    def __new__(cls, raw: Tensor, gpu: torch.device) -> "SimulatedTensor":
        made: SimulatedTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, raw.shape, strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype, device=gpu
        )
        made.raw, made.gpu = raw, gpu
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was reached without the GPU")


class Device:
    """One of the GPUs.

    Attributes:
        streams: its streams.
        memory: what its tensors and graphs take.
    """

    def __init__(self, index: int) -> None:
        self.index, self.memory = index, Memory()
        self.streams = Streams(torch.device("cuda", index))


class Current:
    """Makes a device the one that is entered; may be entered again once it is left."""

    def __init__(self, entered: list[Device], device: Device) -> None:
        self._entered, self._device = entered, device

    def __enter__(self) -> None:
        self._entered.append(self._device)

    def __exit__(self, *_: object) -> None:
        self._entered.pop()


class SimulatedGPU(TorchFunctionMode):
    """The GPUs of a machine. It handles every torch function that is called while it is entered.

    Attributes:
        waits: operations that made the host wait, each with the module that called it.
        counts: what the host asked of them.
        downloads: copies to pinned memory that the host has not waited for.
        devices: the GPUs.
        pinned: pinned memory of the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.counts = Counts()
        self.downloads = Downloads()
        self.devices = [Device(index) for index in range(NUM_GPUS)]
        self._entered: list[Device] = []
        self._capture: Capture | None = None
        self._default_capture_stream: SimulatedStream | None = None
        self._handles = itertools.count(1)
        self.pinned = SimulatedPinned()

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
            if on_gpu and name in ("device", "is_cuda", "is_cpu"):
                return on_gpu[0].gpu if name == "device" else name == "is_cuda"
        if name == "_has_compatible_shallow_copy_type" and on_gpu:
            return False
        if name in ("pin_memory", "is_pinned"):
            raise AssertionError(f"{name} of a tensor; ask for pinned memory where it is made")
        named = [self._device_named(leaf) for leaf in given if _is_gpu(leaf)]
        if not on_gpu and not named:
            return self._on_host(func, args, kwargs)
        device = self._device_of(name, named, on_gpu)
        goes_up = bool(named)
        others = [leaf for leaf in given if isinstance(leaf, Tensor) and not isinstance(leaf, SimulatedTensor)]
        is_upload = False
        if name in ("copy_", "to", "__setitem__"):
            is_upload = self._note_copy(name, args, kwargs, goes_up=goes_up)
        elif any(other.ndim for other in others) and not name.endswith("_like"):
            raise RuntimeError(f"{name}: expected all tensors on the same device, found {on_gpu[0].gpu} and cpu")
        if name == "copy_" and kwargs.get("non_blocking") and self.pinned.holds(args[0]):
            assert self._capture is None
            self.counts.add("download", name)
            return self.downloads.begin(args[0], args[1].raw)
        if goes_up and name in ("tensor", "as_tensor"):
            self.note(f"{name} from pageable memory")
        if on_gpu and self._waits(name, args, kwargs):
            self.note(name)
        comes_down = name in ("cpu", "numpy") or (name == "to" and any(_is_cpu(leaf) for leaf in given))
        mine = {id(one.raw): one for one in on_gpu}
        plain, settings = tree_map(_lowered, args), tree_map(_lowered, kwargs)
        settings.pop("pin_memory", None)
        capture = self._capture if self._capture is not None and self._capture.is_mine else None
        if is_product(func):
            self._multiply(device.streams.current, capture)
        with torch._C.DisableTorchFunction():
            found = func(*plain, **settings)
            if name == "__setitem__":
                # It returns nothing, and launches what it writes.
                if capture is not None:
                    capture.record(Launch(func, plain, settings, {}))
                elif not is_upload:
                    self.counts.add("operation", name)
            if not tensors_of(found):
                return found
            if self._capture is None and not is_upload and name not in (*EMPTY, "__get__"):
                raw = [one.raw for one in on_gpu]
                self.counts.add_operation(name, tensors_of(found), raw, writes="out" in settings)
            if name == "to" and on_gpu and device.index != on_gpu[0].gpu.index:
                found = found.clone()
            if comes_down:
                return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, found)
            if capture is not None:
                assert capture.stream.device.index == device.index, f"{name} on a device that is not captured"
                capture.record(Launch(func, plain, settings, _new(found, on_gpu)))
                if name in EMPTY:
                    # Torch's own operations do run, on indices that no kernel has written.
                    found.zero_()
            return tree_map(lambda leaf: mine[id(leaf)] if id(leaf) in mine else self._raised(leaf, device), found)

    @property
    def memory(self) -> Memory:
        """The memory of the device that tests use."""
        return self.devices[GPU.index].memory

    @property
    def streams(self) -> Streams:
        """The streams of the device that tests use."""
        return self.devices[GPU.index].streams

    @property
    def entered(self) -> Device:
        """The current device. Nothing is to rely on the one that is current where none was chosen."""
        assert self._entered, "what goes to the current device, which is another"
        return self._entered[-1]

    @property
    def is_capturing(self) -> bool:
        return self._capture is not None

    def launch(self, work: Callable[..., Any], args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        """Run a Triton kernel in the interpreter."""
        leaves = tree_leaves((args, settings))
        for leaf in leaves:
            if isinstance(leaf, Tensor) and not isinstance(leaf, SimulatedTensor) and not self.pinned.holds(leaf):
                raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        places = {leaf.gpu.index for leaf in leaves if isinstance(leaf, SimulatedTensor)}
        assert places <= {self.entered.index}, "a kernel goes to the current device, which is another"
        plain, named = tree_map(_lowered, args), tree_map(_lowered, settings)
        if self._capture is not None and self._capture.is_mine:
            # A capture computes nothing, and what kernels would have written stays zero (below).
            self._capture.record(Launch(work, plain, named, {}))
            return None

        def run() -> Any:
            with torch._C.DisableTorchFunction():
                return work(*plain, **named)

        self.counts.add("launch")

        return self.entered.streams.current.launch(run)

    @contextmanager
    def capture(
        self,
        graph: SimulatedGraph,
        pool: object = None,
        stream: SimulatedStream | None = None,
        capture_error_mode: str = "global",
    ) -> Iterator[None]:
        """Replace `torch.cuda.graph`."""
        assert self._capture is None, "another graph is being captured"
        self.forbid("synchronize")
        if stream is None:
            # As in torch: one for the process, of the device that is current at the first capture.
            self._default_capture_stream = self._default_capture_stream or self.stream()
            stream = self._default_capture_stream
        self.empty_cache()
        device = self.devices[stream.device.index]
        own = Pool() if pool is None else device.memory.pool(pool)
        with self.choose(stream):
            self._capture = capture = Capture(graph, own, device.memory.alive_in(own), stream, capture_error_mode)
            device.memory.count_graphs()
            try:
                yield
            finally:
                self._capture = None
        capture.end()
        graph.forget()
        with_counts(graph, self.counts)

    def be_current(self, device: torch.device | int) -> "Current":
        """Replace `torch.cuda.device`."""
        return Current(self._entered, self.devices[device if isinstance(device, int) else device.index])

    @contextmanager
    def choose(self, stream: SimulatedStream) -> Iterator[None]:
        """Replace `torch.cuda.stream`."""
        streams = self.devices[stream.device.index].streams
        before, streams.current = streams.current, stream
        try:
            with self.be_current(stream.device):
                yield
        finally:
            streams.current = before

    def event(self, *, enable_timing: bool = False) -> SimulatedEvent:  # noqa: ARG002
        """Replace `torch.cuda.Event`."""
        return SimulatedEvent(self)

    def stream(self, device: torch.device | None = None) -> SimulatedStream:
        """Replace `torch.cuda.Stream`."""
        own = self.entered if device is None else self.devices[device.index]
        return SimulatedStream(own.streams, torch.device("cuda", own.index))

    def synchronize(self, device: torch.device | None = None) -> None:
        """Replace `torch.cuda.synchronize`."""
        assert device is not None or self.entered
        self.forbid("synchronize")
        self.note("synchronize")

    def empty_cache(self) -> None:
        """Replace `torch.cuda.empty_cache`."""
        for device in self.devices:
            device.memory.empty_cache()

    def pool_handle(self) -> tuple[int, int]:
        """Replace `torch.cuda.graph_pool_handle`."""
        return (0, next(self._handles))

    def forbid(self, what: str) -> None:
        """Refuse what is unsafe while a graph is captured; see `Capture.forbid`."""
        if self._capture is not None:
            self._capture.forbid(what)

    def _device_named(self, name: Any) -> Device:
        device = torch.device(name) if isinstance(name, str) else name
        return self.devices[GPU.index if device.index is None else device.index]

    def _device_of(self, name: str, named: list[Device], on_gpu: list[SimulatedTensor]) -> Device:
        """Return where an operation runs."""
        found = {one.gpu.index for one in on_gpu}
        if len(found) > 1 and name not in ("copy_", "to"):
            raise RuntimeError(f"{name}: expected all tensors on the same device, found {sorted(found)}")
        return named[0] if named else self.devices[on_gpu[0].gpu.index]

    def _multiply(self, stream: SimulatedStream, capture: Capture | None) -> None:
        """Let cuBLAS run on a stream."""
        if stream.workspace is None or stream.workspace.is_freed:
            stream.workspace = Workspace(None if capture is None else capture.pool)
        if capture is not None:
            capture.graph.workspaces.append(stream.workspace)

    def _raised(self, leaf: Any, device: Device) -> Any:
        """Return a result as a tensor of the device."""
        if not isinstance(leaf, Tensor):
            return leaf
        made = SimulatedTensor(leaf, torch.device("cuda", device.index))
        pool, capture = device.memory.general, self._capture
        if capture is not None and not device.memory.holds(leaf):
            if capture.is_mine:
                pool = capture.pool
            else:
                self.forbid("allocation of device memory")
        device.memory.hold(made, leaf, pool)
        return made

    def _on_host(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_pinned = kwargs.pop("pin_memory", False)
        if is_pinned and func is torch.tensor and isinstance(args[0], np.ndarray):
            raise RuntimeError("Can't pin tensor constructed from numpy")
        found = func(*args, **kwargs)
        if is_pinned:
            self.forbid("allocation of pinned memory")
            self.pinned.allocate(found)
        return found

    def _note_copy(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, goes_up: bool) -> bool:
        """Record a copy between host and device that makes the host wait, and refuse it in a capture.

        Returns:
            Whether it is an upload.
        """
        source = args[0] if name == "to" else args[-1]
        if not isinstance(source, Tensor):
            return False
        up = not isinstance(source, SimulatedTensor) and (goes_up or isinstance(args[0], SimulatedTensor))
        down = isinstance(source, SimulatedTensor) and not isinstance(args[0], SimulatedTensor)
        if up and source.numel() and source.ndim and not (self.pinned.holds(source) and (kwargs.get("non_blocking"))):
            self.note(f"{name} from pageable memory")
        if down and not (kwargs.get("non_blocking") and self.pinned.holds(args[0])):
            self.note(f"{name} to the host")
        if up and self._capture is not None and self._capture.is_mine:
            raise AssertionError(f"{name} from the host while a graph is captured")
        if up:
            self.counts.add("upload", name)
            if kwargs.get("non_blocking") and self.pinned.holds(source):
                self.pinned.lend(source)
        return up

    def _waits(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if name == "repeat_interleave":
            return isinstance(args[1], Tensor) and "output_size" not in kwargs
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            value = args[2] if name == "__setitem__" else args[0]
            is_number = not isinstance(value, SimulatedTensor) and not getattr(value, "ndim", 0)
            # A list becomes a tensor in pageable memory, and so does a number that `index_put_` gets; the size of a
            # masked selection depends on the mask's values.
            return any(
                isinstance(one, list) or (isinstance(one, Tensor) and (is_number or one.dtype == torch.bool))
                for one in index
            )
        return name in READERS or (name == "to" and any(_is_cpu(leaf) for leaf in tree_leaves((args, kwargs))))

    def note(self, what: str, until: int | None = None) -> None:
        """Record that the host waits, and who lets it.

        Args:
            until: downloads that are there afterwards; None for all.
        """
        if self._capture is not None and self._capture.is_mine:
            raise AssertionError(f"{what} while a graph is captured")
        frame = sys._getframe(1)
        while not frame.f_globals["__name__"].startswith("specdec.") and frame.f_back is not None:
            frame = frame.f_back
        self.waits.append(f"{frame.f_globals['__name__']}: {what}")
        self.downloads.finish(until)
        self.pinned.take_back()


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
        "get_device_properties": SimpleNamespace(multi_processor_count=4, major=9, minor=0),
        "mem_get_info": (60 << 20, 64 << 20),
        "max_memory_reserved": 4 << 20,
        "memory_reserved": 4 << 20,
        "reset_peak_memory_stats": None,
        # Where none was chosen, the one that "cuda" means.
        "current_device": GPU.index,
        "device_count": NUM_GPUS,
    }
    for name, answer in answers.items():
        patch.setattr(torch.cuda, name, Mock(return_value=answer))
    replaced = {
        "synchronize": gpu.synchronize,
        "empty_cache": gpu.empty_cache,
        "graph_pool_handle": gpu.pool_handle,
        "device": gpu.be_current,
        "Event": gpu.event,
        "Stream": gpu.stream,
        "current_stream": lambda _=None: gpu.entered.streams.current,
        "stream": gpu.choose,
        "cudart": lambda: gpu.pinned,
        "CUDAGraph": SimulatedGraph,
        "graph": gpu.capture,
    }
    for name, function in replaced.items():
        patch.setattr(torch.cuda, name, function)
    # The interpreter takes long for what a GPU does at once: few graphs, captured at the first run; more by night.
    patch.setattr("specdec.execution.cuda_graphs.WARM_UPS", 1)
    patch.setattr("specdec.verify.pass_graphs.TOKEN_BUCKETS", BUCKETS)
    with gpu:
        yield gpu


def _lowered(leaf: Any) -> Any:
    if isinstance(leaf, SimulatedTensor):
        return leaf.raw
    return CPU if _is_gpu(leaf) else leaf


def _new(found: Any, given: list[SimulatedTensor]) -> dict[int, Tensor]:
    """Return the results that have memory of their own, by index."""
    held = {one.raw.untyped_storage().data_ptr() for one in given}
    return {i: one for i, one in enumerate(tensors_of(found)) if one.untyped_storage().data_ptr() not in held}


def _is_gpu(leaf: Any) -> bool:
    return (isinstance(leaf, torch.device) and leaf.type == "cuda") or (isinstance(leaf, str) and leaf[:4] == "cuda")


def _is_cpu(leaf: Any) -> bool:
    return leaf == CPU or leaf == "cpu" if isinstance(leaf, torch.device | str) else False
