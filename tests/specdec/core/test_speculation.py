"""Bounds of a request's drafts, and the errors of values outside their range."""

import re
from typing import Any

import numpy as np
import pytest

from specdec import SamplingParams, Speculation
from specdec.async_engine.messages import decode_command, encode_command
from specdec.core.commands import Add

LEAST = "at least 1, or None"


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        *((name, value, LEAST) for name in ("max_nodes", "max_depth") for value in (0, -3)),
        *((name, value, "a whole number") for name in ("max_nodes", "max_depth") for value in (1.5, True, "3")),
        *(("enabled", value, "True or False") for value in (None, 1, "no")),
    ],
)
def test_a_bad_value_is_named_with_its_range(name: str, value: Any, wanted: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(f"{name} is {value!r}; it must be {wanted}") + "$"):
        Speculation(**{name: value})


def test_it_reaches_the_engine_process_as_it_was_given() -> None:
    asked = Speculation(enabled=False, max_nodes=np.int64(3), max_depth=2)  # type: ignore[arg-type]
    assert type(asked.max_nodes) is int
    for params in (SamplingParams(), SamplingParams(speculation=asked)):
        add = decode_command(encode_command(Add([3], params)))
        assert isinstance(add, Add)
        assert add.params.speculation == params.speculation
