"""Test processes and their threads, Hypothesis profiles, a silent transformers, and what every engine in tests begins
with: caches of NaN, and costs of steps that are measured once.
"""

import os
from collections.abc import Callable, Hashable, Iterator
from types import SimpleNamespace
from typing import Any

# torch reads the number of its threads when it is imported, transformers whether it may use the network. One thread
# each: a test process runs on every core, and tiny models gain nothing from threads that wait for each other.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

# Before anything imports a kernel.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=25, print_blob=True, suppress_health_check=SLOW
)
settings.register_profile("dev", deadline=None, max_examples=25, suppress_health_check=SLOW)
settings.register_profile("nightly", deadline=None, max_examples=2000, suppress_health_check=SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Run files and tests named on the command line in this process, folders and the whole suite on all cores."""
    named = [argument.partition("::")[0] for argument in config.args]
    return 0 if named and all(name.endswith(".py") for name in named) else None


@pytest.fixture(autouse=True, scope="session")
def patched_triton_language() -> None:
    """Spare Triton's interpreter what took two thirds of the time of kernel tests.

    It patches `triton.language` at every launch; here once. After every sum and product of integers it computes
    whether it overflowed, but looks at that only while debugging. And for every value it makes the type of a block, its
    shape and numpy's name of its type anew; here once for each type.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        import triton.language as tl
        from triton.runtime import interpreter

        interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        interpreter._patch_lang = lambda _: SimpleNamespace(restore=lambda: None)
        interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
        interpreter._get_np_dtype = _once_for_each(interpreter._get_np_dtype, lambda dtype: dtype.name)
        block, tensor = tl.core.block_type, tl.core.tensor
        block.__init__ = _filled_once(block.__init__, lambda element, shape: (element.name, *map(int, shape)))
        tensor.__init__ = _filled_once(tensor.__init__, lambda _, type: type.name, changing="handle")


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


class _PoisonedTorch:
    """Torch, but `empty` is full of NaN; bytes, of codes and their scales, are all 255, whose scales are NaN."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*args: Any, **kwargs: Any) -> Tensor:
        made = torch.empty(*args, **kwargs)
        return made.fill_(255 if made.dtype == torch.uint8 else float("nan"))


@pytest.fixture(autouse=True, scope="session")
def nan_cache() -> Iterator[None]:
    """Every cache starts as NaN, so that a slot read before it was written spoils the result."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("cache.kv_cache", "kv_transfer.host_blocks"):
            patch.setattr(f"specdec.{module}.torch", _PoisonedTorch())
        yield


@pytest.fixture(autouse=True, scope="session")
def short_measurements() -> Iterator[None]:
    """Every engine measures its steps once instead of seven times or more: that took longer than what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"ROUNDS": 1, "LEAST_SECONDS": 0.0, "IN_A_ROW": 1}.items():
            patch.setattr(f"specdec.execution.cost_measurement.{name}", value)
        yield
