"""What a failed property test prints: values from which its case can be run again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from specdec import SamplingParams
from tests.draft_heads.drawn_readouts import readouts
from tests.kernels.native_forms import libraries
from tests.specdec.drawn_requests import arrivals, shapes
from tests.specdec.scheduling.scheduled_world import cases
from tests.specdec.world import World
from tests.strategies import draft_shapes, draft_trees, prompts, sampling_params, samplings, speculations
from tests.verify.exact import Model
from tests.verify.models import models

STRATEGIES = {
    "arrivals": arrivals,
    "cases": cases(connectors=True),
    "draft_shapes": draft_shapes(),
    "draft_trees": draft_trees(4, 9),
    "libraries": libraries,
    "models": models,
    "prompts": prompts(9, 4),
    "readouts": readouts,
    "sampling_params": sampling_params(),
    "samplings": samplings(9),
    "shapes": shapes,
    "speculations": speculations(),
}


def printed(test: Callable[..., None]) -> str:
    """Return what hypothesis adds to the error of a test that fails."""
    with pytest.raises(ZeroDivisionError) as caught:
        test()
    return "\n".join(caught.value.__notes__)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_failure_prints_what_was_drawn(name: str) -> None:
    """Also in a process that has imported schemathesis, which turns hypothesis' printer off."""

    @settings(database=None, max_examples=1, phases=[Phase.generate])
    @given(drawn=STRATEGIES[name])
    def fail(drawn: object) -> None:
        raise ZeroDivisionError(drawn)

    found = printed(fail)
    assert "drawn=" in found
    assert "drawn=," not in found
    assert " at 0x" not in found
    assert "@reproduce_failure" in found


def test_values_are_those_that_were_drawn() -> None:
    @settings(database=None, max_examples=1, phases=[Phase.generate])
    @given(params=st.builds(SamplingParams, seed=st.just(7)), size=st.just(3))
    def fail(params: SamplingParams, size: int) -> None:
        raise ZeroDivisionError(params, size)

    found = printed(fail)
    assert "params=SamplingParams(seed=7)" in found
    assert "size=3" in found


def test_a_world_is_named_by_its_folder() -> None:
    unused: Any = None
    assert repr(World(Path("somewhere"), unused, unused)) == "World('somewhere')"


def test_a_model_is_made_again_from_what_is_printed() -> None:
    model = Model(3, 5)
    again = eval(repr(model), {"Model": Model})
    assert (again.p(()) == model.p(())).all()
