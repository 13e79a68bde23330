"""Test processes and their threads, Hypothesis' profiles, a silent transformers, the order of programs in Triton's
interpreter, and what every engine in tests begins with: caches of NaN, and costs of steps that are measured once.
"""

import gc
import os
import random
import secrets
import zlib
from collections.abc import Generator, Iterator
from typing import Any

# torch reads the number of its threads when it is imported, transformers whether it may use the network. One thread
# each: a test process runs on every core, and tiny models gain nothing from threads that wait for each other.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import hypothesis.core
import pytest
import torch
from hypothesis.vendor.pretty import RepresentationPrinter
from torch import Tensor

import tests.profiles  # noqa: F401
from specdec.core.garbage import loading
from tests.triton_interpreter import SEED, grid_seed, prepare_interpreter

_SEED = "hypothesis_seed"
# The tests of the whole suite; see pyproject.toml.
_DEFAULT = "not (long or nightly)"

# Before anything imports a kernel.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _names_files(config: pytest.Config) -> bool:
    """Whether the command line names files and tests alone."""
    named = [argument.partition("::")[0] for argument in config.args]
    return bool(named) and all(name.endswith(".py") for name in named)


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Run files and tests named on the command line in this process, folders and the whole suite on all cores."""
    return 0 if _names_files(config) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Spare the collector the million objects of imported modules and collected tests, which all stay."""
    with loading():
        found = yield
    return found


def pytest_unconfigure() -> None:
    """Let the collector see them again, since the interpreter reports at its end what was never freed."""
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what one runs while working: what is neither of a module that is marked slow, nor long, nor of the night."""
    for item in items:
        if not any(item.get_closest_marker(name) for name in ("slow", "long", "nightly")):
            item.add_marker("fast")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Make tests independent of chance and of what ran before, and have failed property tests print their values."""
    # What draws without a seed: torch, and the seeds of requests of an engine in this process that bring none.
    # Hypothesis keeps the state of `random` for each case by itself.
    seed = zlib.crc32(item.nodeid.encode())
    torch.manual_seed(seed)
    random.seed(seed)
    secrets.randbits = random.getrandbits  # type: ignore[assignment]
    # Schemathesis, once imported, leaves values out of the failures of all tests.
    hypothesis.core.RepresentationPrinter = RepresentationPrinter  # type: ignore[attr-defined]


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Draw the seed of property tests, unless one is given. All test processes have the same.

    Named files are run with their long tests.
    """
    if config.option.markexpr == _DEFAULT and _names_files(config):
        config.option.markexpr = "not nightly"
    given = getattr(config, "workerinput", {}).get(_SEED) or config.option.hypothesis_seed
    config.option.hypothesis_seed = given or str(secrets.randbits(32))
    hypothesis.core.global_force_seed = int(config.option.hypothesis_seed)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the seed to a test process that xdist starts."""
    node.workerinput[_SEED] = node.config.option.hypothesis_seed


def pytest_report_header(config: pytest.Config) -> str:
    """Say what was drawn for this run: the seed of property tests, and the order in which programs of a grid run."""
    return f"drawn for this run: {SEED}={grid_seed()} pytest --hypothesis-seed={config.option.hypothesis_seed}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say it again below failures, where no header is shown."""
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(pytest_report_header(terminalreporter.config))


@pytest.fixture(autouse=True, scope="session")
def triton_interpreter() -> None:
    """Kernels run in Triton's interpreter as on a GPU."""
    prepare_interpreter()


class _PoisonedTorch:
    """Torch, but `empty` is full of NaN; bytes, of codes and their scales, are all 255, whose scales are NaN."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*args: Any, **kwargs: Any) -> Tensor:
        made = torch.empty(*args, **kwargs)
        return made.fill_(255 if made.dtype == torch.uint8 else float("nan"))


@pytest.fixture(autouse=True, scope="session")
def freed_engines() -> Iterator[None]:
    """No command that a test calls exempts the garbage of tests before it: their engines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "freeze", lambda: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def nan_cache() -> Iterator[None]:
    """Every cache starts as NaN, so that a slot read before it was written spoils the result."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("cache.kv_cache", "kv_transfer.host_blocks"):
            patch.setattr(f"specdec.{module}.torch", _PoisonedTorch())
        yield


@pytest.fixture(autouse=True, scope="session")
def untried_drafts() -> Iterator[None]:
    """No engine tries its drafts at start: heads in tests are random, which it would tell of each time.

    The first rank has no prompts for it, so that ranks in other processes do without as well. Nor is there a
    warm-up, which takes seconds in Triton's interpreter.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.building.engine_builder.questions", lambda *_: [])
        patch.setattr("specdec.building.engine_builder.warmup_kinds", lambda *_, **__: [])
        yield


@pytest.fixture(autouse=True, scope="session")
def short_measurements() -> Iterator[None]:
    """Every engine measures its steps once instead of seven times or more: that took longer than what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"ROUNDS": 1, "LEAST_SECONDS": 0.0, "IN_A_ROW": 1}.items():
            patch.setattr(f"specdec.execution.cost_measurement.{name}", value)
        yield
