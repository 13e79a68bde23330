# mypy: allow-untyped-defs, allow-untyped-decorators
"""What is recorded of a launch, and that a launch that is not recorded fails a test."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.recorded_launches import RECORD, check_recorded, recorded
from tests.triton_interpreter import is_interpreted
from tests.triton_launches import ALIGNED, Launch, recorded_launches

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


# Integers of which an engine has one value.
OF_AN_ENGINE = {"layers", "kv_heads"}


def test_no_kernel_has_another_form_where_a_step_has_other_numbers() -> None:
    """By an address that 16 does not divide, or a number of 1, it would be compiled while requests run."""

    def plain(name: str, value: Any) -> Any:
        if isinstance(value, str):
            return value.removesuffix(ALIGNED)
        return "i32" if value == 1 and name.islower() and name not in OF_AN_ENGINE else value

    forms: dict[str, list[Launch]] = {}
    for launch in recorded():
        arguments = {name: plain(name, value) for name, value in launch.arguments.items()}
        forms.setdefault(replace(launch, arguments=arguments).line, []).append(launch)
    assert len(forms) > 50
    assert [own for own in forms.values() if len(own) > 1] == []
