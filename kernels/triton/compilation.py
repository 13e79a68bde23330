"""Counts of the kernels that Triton compiles, or finds in its cache, during a block of code."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from triton import knobs


@dataclass
class CompiledKernels:
    """Kernels that were compiled, or found in the cache.

    Attributes:
        folder: of Triton's cache.
        seconds: of compiling, and of nothing else.
    """

    folder: str = field(default_factory=lambda: str(knobs.cache.dir))
    num_compiled: int = 0
    num_found: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        found = f"{self.num_found} found in {self.folder}"
        return f"{self.num_compiled} kernels compiled in {self.seconds:.0f} s, {found}"


@contextmanager
def counted_compilation() -> Iterator[CompiledKernels]:
    """Count what Triton compiles within the context. A listener that was set before is still called."""
    counted, before = CompiledKernels(), knobs.compilation.listener

    def listen(*, times: Any, cache_hit: bool, **rest: Any) -> None:
        if cache_hit:
            counted.num_found += 1
        else:
            counted.num_compiled += 1
            counted.seconds += times.total / 1e6
        if before is not None:
            before(times=times, cache_hit=cache_hit, **rest)

    knobs.compilation.listener = listen
    try:
        yield counted
    finally:
        knobs.compilation.listener = before
