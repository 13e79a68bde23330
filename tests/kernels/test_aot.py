"""Every kernel, compiled for an A100 and an H100 without one: for the models that we name in figures, and otherwise."""

from dataclasses import replace

import pytest

from tests.kernels.aot import SHARED_LIMIT, compile_all, table
from tests.kernels.model_launches import model_launches
from tests.kernels.recorded_launches import launches_on
from tests.triton_interpreter import is_interpreted
from tests.triton_launches import ALIGNED, Launch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_interpreted(), reason="launches are those of the interpreter"),
    # Some two hundred kernels, compiled one after another.
    pytest.mark.timeout(1800),
]


@pytest.mark.long
@pytest.mark.parametrize("arch", SHARED_LIMIT)
def test_named_models_fit_a_block_without_spilling(arch: int) -> None:
    compiled = list(compile_all(model_launches(arch), arch))
    assert len(compiled) > 100
    print(f"\n{table(compiled, arch)}")
    assert {launch.line: found.fault(arch) for launch, found in compiled if found.fault(arch)} == {}


@pytest.mark.long
def test_every_integer_may_be_one() -> None:
    """Triton makes a constant of an integer that is 1, which has no methods."""
    first: dict[str, Launch] = {}
    for launch in model_launches(90):
        first.setdefault(launch.kernel, launch)
    ones = [with_ones(launch) for launch in first.values()]
    assert any(one.constants.get("kv_heads") == 1 for one in ones)
    assert {one.line: found.error for one, found in compile_all(ones, 90) if found.error} == {}


def with_ones(launch: Launch) -> Launch:
    """Return the launch with 1 for every integer that Triton may compile in."""
    kept = launch.function().kwargs["do_not_specialize"] or ()
    integers = [name for name, kind in launch.types.items() if kind.removesuffix(ALIGNED) in ("i32", "i64")]
    ones = {name: 1 for name in integers if name not in kept}
    return replace(launch, arguments={name: ones.get(name, value) for name, value in launch.arguments.items()})


def test_launches_are_those_of_an_architecture() -> None:
    """Attention has other loop settings on an H100 than on an A100, and fewer heights of tiles."""
    of_a100, of_h100 = (model_launches(arch) for arch in (80, 90))
    assert of_a100 != of_h100
    assert {one.line for one in launches_on(80, of_h100)} < {one.line for one in of_a100}
    assert launches_on(90, of_h100) == of_h100
