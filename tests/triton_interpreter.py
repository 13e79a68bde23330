"""Triton's interpreter as tests run it: as strict and as exact as a GPU, in every supported version, and faster.

- The programs of a grid run in an order that a seed draws, as a GPU has none of its own.
- Integers that are 1 are constants, as for the compiler.
- float32 is rounded to bfloat16, and bfloat16 multiplied, as on a GPU.
"""

import os
import secrets
from collections.abc import Callable, Hashable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

# The variable of the environment that holds the seed.
SEED = "SPECDEC_GRID_SEED"


def grid_seed() -> int:
    """Return the seed of the order of programs: a new one, unless the environment, as of a child process, has it."""
    return int(os.environ.setdefault(SEED, str(secrets.randbelow(1 << 32))))


def is_interpreted() -> bool:
    """Return whether kernels run in the interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def prepare_interpreter() -> None:
    """Change the interpreter of this process, if kernels run in it."""
    if not is_interpreted():
        return
    from triton.runtime import interpreter

    _patch_language_once(interpreter)
    _make_types_once(interpreter)
    _compare_types_quickly(interpreter)
    _round_to_bfloat16(interpreter)
    _multiply_bfloat16(interpreter)
    _shuffle_programs(interpreter.InterpreterBuilder)
    _compile_ones_in(interpreter)


def _patch_language_once(interpreter: Any) -> None:
    """Spare what took most of the time of kernel tests.

    The interpreter patches `triton.language` at every launch; here once. After every sum and product of integers it
    computes whether it overflowed, but looks at that only while debugging.
    """
    tl = interpreter.tl
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda _: SimpleNamespace(restore=lambda: None)
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    # A scalar is an array of one number, which numpy 2.5 no longer takes for a number; Triton 3.6 still does.
    tl.core.tensor.__index__ = lambda self: int(self.handle.data.squeeze())


def _make_types_once(interpreter: Any) -> None:
    """Make the type of a block, its shape and numpy's name of its type once, not for every value."""
    interpreter._get_np_dtype = _once_for_each(interpreter._get_np_dtype, lambda dtype: dtype.name)
    block, tensor = interpreter.tl.core.block_type, interpreter.tl.core.tensor
    block.__init__ = _filled_once(block.__init__, lambda element, shape: (element.name, *map(int, shape)))
    tensor.__init__ = _filled_once(tensor.__init__, lambda _, type: type.name, changing="handle")


def _compare_types_quickly(interpreter: Any) -> None:
    """Find out with Python's own lists what Triton finds out with tuples of constants, which took half of the time.

    That is whether two blocks have one shape, so that neither is broadcast, and whether a value is a constant.
    """
    core, semantic = interpreter.tl.core, type(interpreter.interpreter_semantic)
    unwrap, broadcast = core._unwrap_if_constexpr, semantic.broadcast_impl_value
    plain = frozenset({int, bool, float, str, type(None), core.tensor, core.dtype, core.block_type, core.pointer_type})

    def has_shape_of(one: Any, other: Any) -> bool:
        return [*one.shape] == [*other.shape]

    def equal(one: Any, other: Any) -> bool:
        return isinstance(other, core.block_type) and one.element_ty == other.element_ty and has_shape_of(one, other)

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and has_shape_of(lhs.type, rhs.type):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    core.block_type.__eq__ = equal
    core._unwrap_if_constexpr = lambda value: value if type(value) in plain else unwrap(value)
    semantic.broadcast_impl_value = broadcast_impl_value


def _once_for_each(function: Callable[[Any], Any], key: Callable[[Any], Hashable]) -> Callable[[Any], Any]:
    found: dict[Hashable, Any] = {}

    def answer(argument: Any) -> Any:
        name = key(argument)
        if name not in found:
            found[name] = function(argument)
        return found[name]

    return answer


def _filled_once(
    begin: Callable[..., None], key: Callable[..., Hashable], changing: str | None = None
) -> Callable[..., None]:
    """Return an `__init__` that gives objects of the same key the same attributes; the first argument is `changing`."""
    found: dict[Hashable, dict[str, Any]] = {}

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        name = key(*args, **kwargs)
        if name not in found:
            begin(self, *args, **kwargs)
            found[name] = dict(vars(self))
        vars(self).update(found[name])
        if changing:
            setattr(self, changing, args[0])

    return init


def _round_to_bfloat16(interpreter: Any) -> None:
    """Round float32 to the nearest bfloat16 as every GPU does; the interpreter truncates."""
    convert, tl = interpreter._convert_float, interpreter.tl

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            numbers = torch.from_numpy(np.ascontiguousarray(data))
            return numbers.to(torch.bfloat16).view(torch.uint16).numpy()
        return convert(data, source, target, mode)

    interpreter._convert_float = rounded


def _multiply_bfloat16(interpreter: Any) -> None:
    """Multiply bfloat16 as every GPU does; the interpreter takes its bits for integers."""
    builder, tl = interpreter.InterpreterBuilder, interpreter.tl
    multiply = builder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return multiply(self, widened(a), widened(b), *others)

    builder.create_dot = create_dot


def _shuffle_programs(builder: Any) -> None:
    """Give the programs of each grid an order that depends on the seed and on the grid alone.

    The interpreter still counts through the grid; each count stands for another program.
    """
    set_index = builder.set_grid_idx

    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        _, columns, layers = self.grid_dim
        order = _order(grid_seed(), self.grid_dim)
        set_index(self, *map(int, np.unravel_index(order[(x * columns + y) * layers + z], self.grid_dim)))

    builder.set_grid_idx = set_grid_idx


@cache
def _order(seed: int, grid: tuple[int, int, int]) -> Any:
    return np.random.default_rng([seed, *grid]).permutation(int(np.prod(grid)))


def _compile_ones_in(interpreter: Any) -> None:
    """Pass what Triton would make a constant of as a plain number, which has no methods either."""
    from tests.triton_launches import launch_of

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        assert not warmup
        executor = interpreter.GridExecutor(self.rewrite(), self.arg_names, grid, self.pre_run_hooks)
        executor.constexprs = list(launch_of(self, args, kwargs).constants)
        return executor(*args, **kwargs)

    interpreter.InterpretedFunction.run = run
