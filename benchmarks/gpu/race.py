"""Calls that do the same, each checked, then timed in turns."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.clock import Clock, Run

# What a call may take of a round, if it need not run more than once for that.
ROUND_US = 5000
# What the first calls of one peer, which compile it, may take of a run.
COMPILING_SECONDS = 90
# Largest error of a vector, over its length: weights and result rounded, some sums in another order.
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
EXACT = 0.0


class Peer(NamedTuple):
    """Something to be compared with.

    Attributes:
        run: the call.
        result: makes of what it returns what ours returns; None where that cannot be had from it.
        captured: whether it can be part of a CUDA graph: it never waits for the device.
    """

    run: Run
    result: Callable[[Any], Any] | None = lambda returned: returned
    captured: bool = True


class Case(NamedTuple):
    """A call of ours and its peers, on the same inputs.

    Attributes:
        run: ours; returns a tensor, several, or None.
        twin: does the same in plain torch.
        num_bytes: the fewest that must be read and written.
        bound: of the error.
        peers: by name.
        changed: tensors that the call changes in place, which are results too.
        flops: of matrix products.
    """

    run: Run
    twin: Run
    num_bytes: int
    bound: float
    peers: dict[str, Peer]
    changed: tuple[Tensor, ...] = ()
    flops: int = 0


class Subject(NamedTuple):
    """One measurement, built when its turn comes."""

    kernel: str
    shape: dict[str, int | str]
    build: Callable[[], Case]


@dataclass
class Race:
    """Measures subjects until `deadline`, of `time.monotonic`."""

    clock: Clock
    rounds: int
    iterations: int
    deadline: float
    first_calls: dict[str, float] = field(default_factory=dict)

    def measure(self, subject: Subject) -> dict[str, Any]:
        """A row of figures. Peers that cannot run say why.

        Raises:
            ValueError: a result of ours is wrong.
        """
        case = subject.build()
        expected = results(case.twin, case.changed)
        error = worst_error(results(case.run, case.changed), expected)
        # NaN is wrong as well.
        if not error <= case.bound:
            raise ValueError(f"an error of {error:.3g}, where {case.bound:.3g} is allowed")
        runs = {"": self.clock.prepare(case.run, captured=True)}
        peers: dict[str, dict[str, Any]] = {}
        for name, peer in case.peers.items():
            try:
                peers[name] = self._checked(name, peer, expected, case)
                runs[name] = self.clock.prepare(peer.run, peer.captured)
            except Exception as caught:  # Whatever it is, ours is to be measured.
                peers[name] = {"missing": reason(caught)}
        times = self._times(runs)
        us = statistics.median(times[""])
        for name in runs:
            if name:
                ratios = [theirs / ours for theirs, ours in zip(times[name], times[""], strict=True)]
                peers[name] |= {
                    "us": rounded(statistics.median(times[name])),
                    "ratio": rounded(statistics.median(ratios)),
                }
        row = {
            "kernel": subject.kernel,
            "shape": subject.shape,
            "us": rounded(us),
            "spread": rounded((max(times[""]) - min(times[""])) / us),
            "rounds": len(times[""]),
            "gb_per_s": rounded(case.num_bytes / us / 1e3),
            "error": rounded(error),
            "error_bound": case.bound,
            "peers": peers,
        }
        return row | ({"tflop_per_s": rounded(case.flops / us / 1e6)} if case.flops else {})

    def _checked(self, name: str, peer: Peer, expected: Sequence[Tensor], case: Case) -> dict[str, Any]:
        spent = self.first_calls.get(name, 0.0)
        if spent > COMPILING_SECONDS:
            raise TimeoutError(f"its first calls have taken {spent:.0f} s")
        start = time.monotonic()
        try:
            made = results(peer.run, case.changed, peer.result or (lambda _: None))
        finally:
            self.first_calls[name] = spent + time.monotonic() - start
        return {"error": rounded(worst_error(made, expected)) if peer.result else None}

    def _times(self, runs: dict[str, Run]) -> dict[str, list[float]]:
        """Medians of each round, in microseconds."""
        iterations = {}
        for name, run in runs.items():
            once = self.clock.median_us(run, 1)
            iterations[name] = max(1, min(self.iterations, int(ROUND_US / once)))
        times: dict[str, list[float]] = {name: [] for name in runs}
        for round_number in range(self.rounds):
            if round_number and time.monotonic() > self.deadline:
                break
            for name, run in runs.items():
                times[name].append(self.clock.median_us(run, iterations[name]))
        return times


def results(
    run: Run, changed: Sequence[Tensor], result: Callable[[Any], Any] = lambda returned: returned
) -> list[Tensor]:
    """Run a call; return its result and the tensors it changed, and restore those tensors."""
    before = [tensor.clone() for tensor in changed]
    returned = result(run())
    if torch.cuda.is_available():
        # What is the host's own can be looked at while a kernel still writes it.
        torch.cuda.synchronize()
    made = [returned] if isinstance(returned, Tensor) else list(returned or ())
    made += [tensor.clone() for tensor in changed]
    for tensor, old in zip(changed, before, strict=True):
        tensor.copy_(old)
    return made


def worst_error(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest error of a vector (the last dimension) over its length; of integers, the share that differs."""
    errors = []
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
        if theirs.is_floating_point():
            difference = torch.linalg.vector_norm(ours.float() - theirs.float(), dim=-1)
            errors.append((difference / torch.linalg.vector_norm(theirs.float(), dim=-1).clamp(min=1e-30)).max())
        else:
            errors.append((ours != theirs).float().mean())
    return float(torch.stack(errors).max())


def rounded(figure: float) -> float:
    """Round to four significant digits."""
    return float(f"{figure:.4g}")


def reason(caught: BaseException) -> str:
    """One line."""
    lines = str(caught).strip().splitlines()
    return f"{type(caught).__name__}: {lines[0] if lines else ''}"[:200]
