"""Parameters of a beam search, and their errors."""

from typing import Any

import pytest

from specdec import BeamSearchParams


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"beam_width": 0}, "beam_width is 0; it must be a whole number of at least 1"),
        ({"beam_width": 1.5}, "beam_width is 1.5"),
        ({"beam_width": True}, "beam_width is True"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": None}, "max_tokens is None"),
        ({"ignore_eos": 1}, "ignore_eos is 1; it must be True or False"),
        ({"length_penalty": float("nan")}, "length_penalty is nan; it must be a number"),
        ({"length_penalty": 51}, "length_penalty is 51; it must be a number of at least -50 and at most 50"),
        ({"length_penalty": "1"}, "length_penalty is '1'"),
        ({"early_stopping": "always"}, "early_stopping is 'always'; it must be True, False or 'never'"),
        ({"early_stopping": 1}, "early_stopping is 1"),
    ],
)
def test_parameters_outside_their_range_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 8, **values})
