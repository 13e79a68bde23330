"""What the first day on a GPU calls equal."""

from typing import Any

import pytest

from benchmarks.gpu.equality import differences, failures_of


def test_the_first_other_token_of_each_request_is_found() -> None:
    assert differences([[1, 2, 3], [4]], [[1, 2, 3], [4]]) == []
    assert differences([[1, 2, 3], [4, 5], [6], [7, 8]], [[1, 9, 9], [4, 5], [6, 6], [7]]) == [[0, 1], [2, 1], [3, 1]]
    with pytest.raises(ValueError, match="longer"):
        differences([[1]], [[1], [2]])


def test_other_tokens_are_failures_in_float32_alone() -> None:
    row: dict[str, Any] = {"target": "demo", "head": "eagle", "temperature": 1.0, "requests": 3, "dtype": "float32"}
    same = {"differs_from_plain": [], "differs_from_cpu": []}
    assert failures_of(row | same) == []
    assert failures_of(row | same | {"differs_from_cpu": [[2, 7]]}) == [
        "demo, head eagle, temperature 1.0: 1 of 3 requests have other tokens than on the CPU; the first, 2, from its "
        "token 7 on"
    ]
    assert failures_of(row | same | {"differs_from_plain": [[0, 1]], "dtype": "bfloat16"}) == []
