"""The two countings of layer ids, made one."""

import pytest

from specdec.draft_heads.formats.tap_ids import Counting, TapIds
from specdec.draft_heads.llama.checkpoint_files import CheckpointError

INPUTS, OUTPUTS = Counting.INPUTS, Counting.OUTPUTS


@pytest.mark.parametrize(
    ("given", "layers", "others"),
    [
        (TapIds(None), (2, 16, 29), ()),
        # The same three layers, as official code and SpecForge count them, whatever was thought before.
        (TapIds((2, 16, 29), INPUTS), (2, 16, 29), ()),
        (TapIds((2, 16, 29), OUTPUTS), (2, 16, 29), ()),
        (TapIds((1, 15, 28), INPUTS), (2, 16, 29), ()),
        (TapIds((1, 15, 28), OUTPUTS), (2, 16, 29), ()),
        # No layer gives the 32nd output.
        (TapIds((8, 20, 32), OUTPUTS), (8, 20, 32), ()),
        (TapIds((8, 20, 30), INPUTS), (8, 20, 30), (9, 21, 31)),
        (TapIds((8, 20, 30), OUTPUTS), (9, 21, 31), (8, 20, 30)),
        (TapIds((8, 20, 30), INPUTS, "speculators"), (8, 20, 30), ()),
        (TapIds((8, 20, 32), INPUTS, "speculators"), (8, 20, 32), ()),
        (TapIds((1, 15, 28), INPUTS, "speculators"), (1, 15, 28), ()),
        (TapIds((0, 31), OUTPUTS), (1, 32), (0, 31)),
        # What goes into layer 0 comes from no layer.
        (TapIds((-1, 4), OUTPUTS), (0, 5), ()),
    ],
    ids=str,
)
def test_ids_become_layers_whose_inputs_are_read(
    given: TapIds, layers: tuple[int, ...], others: tuple[int, ...]
) -> None:
    taps = given.of(32)
    assert (taps.layers, taps.others) == (layers, others)
    assert taps.reason


@pytest.mark.parametrize(
    "given", [TapIds((3, 33)), TapIds((-2, 3)), TapIds((33,), INPUTS, "speculators"), TapIds((-1, 32))]
)
def test_ids_of_no_layer_are_refused(given: TapIds) -> None:
    with pytest.raises(CheckpointError, match="are no layers of a target that has 32"):
        given.of(32)


def test_a_shallow_target_has_no_official_layers() -> None:
    with pytest.raises(CheckpointError, match="a target of 5 layers has no three depths"):
        TapIds(None).of(5)
    assert TapIds((1, 2)).of(5).others == (2, 3)
    assert TapIds((1, 2, 3)).of(6).others == (2, 3, 4)
