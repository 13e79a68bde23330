"""Launches of Triton kernels as Triton compiles them on an NVIDIA GPU, found without one.

Triton compiles a kernel anew for each type of its arguments, each constant, and each option. It makes a constant of an
integer that is 1, and notes which integers and addresses 16 divides. Its own code says so here, of launches in the
interpreter.
"""

import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

# What Triton appends to the type of a number or address that 16 divides.
ALIGNED = ":16"
# Options that a kernel is launched with, and that change its machine code.
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


@dataclass(frozen=True)
class Launch:
    """A kernel with all that its machine code depends on.

    Attributes:
        kernel: module and function.
        arguments: of each, in order, the type of a run-time argument, such as "*bf16", "i32" or "fp32", with ":16"
            behind it where 16 divides it; otherwise the constant that is compiled in: a number, a bool, or None.
        options: those of `OPTIONS` that the launch gives.
    """

    kernel: str
    arguments: dict[str, Any]
    options: dict[str, Any]

    @property
    def line(self) -> str:
        """The launch as JSON; equal for equal machine code."""
        return json.dumps(
            [self.kernel, dict(self.arguments), {name: self.options[name] for name in sorted(self.options)}]
        )

    @staticmethod
    def of_line(line: str) -> "Launch":
        return Launch(*json.loads(line))

    @property
    def label(self) -> str:
        """The kernel's name, the first pointer's type, and its constants, for people."""
        name, kinds = self.kernel.partition(":")[2], list(self.types.values())
        constants = [str(value) for value in self.constants.values() if value is not None and value is not False]
        return " ".join([name.removesuffix("_kernel"), kinds[0].removesuffix(ALIGNED), *constants])

    @property
    def constants(self) -> dict[str, Any]:
        return {name: value for name, value in self.arguments.items() if not isinstance(value, str)}

    @property
    def types(self) -> dict[str, str]:
        return {name: value for name, value in self.arguments.items() if isinstance(value, str)}

    def function(self) -> Any:
        """Return the `@triton.jit` function."""
        module, name = self.kernel.split(":")
        return getattr(importlib.import_module(module), name)


def launch_of(kernel: InterpretedFunction, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Launch:
    """Return what Triton makes of a kernel's arguments."""
    given = {name: value for name, value in kwargs.items() if name not in OPTIONS}
    with torch._C.DisableTorchFunction():
        bound, kinds, _ = _binder(kernel)(
            *map(_argument, args), **{name: _argument(value) for name, value in given.items()}
        )
    arguments = {}
    for (name, value), kind in zip(bound.items(), kinds, strict=True):
        constant = getattr(value, "value", value)
        assert kind[0] != "constexpr" or isinstance(constant, int | float | None), f"{name}: a constant of {constant!r}"
        arguments[name] = constant if kind[0] == "constexpr" else kind[0] + ALIGNED * ("D" in (kind[1] or ""))
    options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
    return Launch(f"{kernel.fn.__module__}:{kernel.fn.__name__}", arguments, options)


@contextmanager
def recorded_launches(*, run: bool = True) -> Iterator[dict[str, Launch]]:
    """Yield the launches of kernels in the interpreter, by their lines, as they come.

    Args:
        run: whether they run as well.
    """
    found: dict[str, Launch] = {}
    launch = InterpretedFunction.run

    def record(kernel: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        seen = launch_of(kernel, args, kwargs)
        found.setdefault(seen.line, seen)
        return launch(kernel, *args, grid=grid, warmup=warmup, **kwargs) if run else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", record)
        yield found


class _Address:
    """A tensor's address as on a GPU, where memory begins at a multiple of 512 bytes."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self._bytes = tensor.dtype, int(tensor.storage_offset()) * tensor.dtype.itemsize

    def data_ptr(self) -> int:
        return self._bytes


def _argument(given: Any) -> Any:
    return _Address(given) if isinstance(given, Tensor) else given


@cache
def _binder(kernel: InterpretedFunction) -> Callable[..., Any]:
    names = ("do_not_specialize", "do_not_specialize_on_alignment")
    compiled = JITFunction(kernel.fn, **{name: kernel.kwargs.get(name) for name in names})
    # Of all GPUs of NVIDIA alike.
    backend = make_backend(GPUTarget("cuda", 90, 32))
    binder: Callable[..., Any] = create_function_from_signature(compiled.signature, compiled.params, backend)
    return binder
