# mypy: allow-untyped-defs, allow-untyped-decorators
"""What is recorded of a launch, and that a launch that is not recorded fails a test."""

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.recorded_launches import RECORD, check_recorded, recorded
from tests.triton_interpreter import is_interpreted
from tests.triton_launches import Launch, recorded_launches

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="launches are those of the interpreter")


@triton.jit(do_not_specialize=["kept"])
def _kernel(p_x, p_none, count, kept, scale, BLOCK: tl.constexpr, FLAG: tl.constexpr = False):  # noqa: ARG001
    tl.store(p_x, count + kept + scale)


def launched(count: int, *, kept: int = 1, offset: int = 0) -> Launch:
    with recorded_launches(run=False) as found:
        _kernel[(2,)](torch.empty(64)[offset:], None, count, kept, 1.0, BLOCK=16, num_warps=2)
    return next(iter(found.values()))


def test_it_is_as_triton_specialises_it() -> None:
    """By alignment of numbers and of addresses, by the size of integers, and with 1 and None compiled in."""
    found = launched(32)
    plain = {"p_x": "*fp32:16", "p_none": None, "count": "i32:16", "kept": "i32", "scale": "fp32", "BLOCK": 16}
    assert found.arguments == {**plain, "FLAG": False}
    assert found.options == {"num_warps": 2}
    assert found.function().fn is _kernel.fn
    assert Launch.of_line(found.line) == found
    assert launched(1).arguments["count"] == 1
    assert launched(7).arguments["count"] == "i32"
    assert launched(2**31 + 1, kept=16).arguments == {**found.arguments, "count": "i64"}
    assert [launched(7, offset=offset).arguments["p_x"] for offset in (1, 4)] == ["*fp32", "*fp32:16"]


def test_another_launch_fails_until_it_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, launches = tmp_path / "launches.jsonl", {one.line: one for one in map(launched, (32, 1, 7))}
    monkeypatch.delenv(RECORD, raising=False)
    with pytest.raises(AssertionError, match=rf"^3 launches were never .* \({RECORD}=1 python -m pytest"):
        check_recorded(launches, file)
    monkeypatch.setenv(RECORD, "1")
    first, *others = launches
    check_recorded({first: launches[first]}, file)
    check_recorded({line: launches[line] for line in others}, file)
    monkeypatch.delenv(RECORD)
    check_recorded(launches, file)
    assert [launch.line for launch in recorded(file)] == sorted(launches)
    with pytest.raises(AssertionError, match=r"^1 launches were never compiled"):
        check_recorded({one.line: one for one in [launched(8, offset=1)]}, file)
