"""Values of ranks measured before, in their file."""

from pathlib import Path

import pytest

from specdec.config import DEMO
from specdec.scheduling.rank_values import FILE, read_values, write_values


def test_values_are_stored_beside_the_head(tmp_path: Path) -> None:
    assert read_values(tmp_path) == []
    assert write_values([0.81234, 0.5], tmp_path) == tmp_path / FILE
    assert read_values(tmp_path) == [0.812, 0.5]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"values": 3}', '{"values": [1.5]}', '{"values": ["0.5"]}'])
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=FILE) as error:
        read_values(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("head", ["eagle", "eagle3"])
def test_the_demo_heads_ship_values(head: str) -> None:
    values = read_values(DEMO / head)
    assert 0.5 < values[0] < 1
    assert values[0] > values[1] > values[7]
