"""Names of blocks in stores."""

import pytest

from specdec.building.block_identity import place_of
from specdec.kv_transfer.cache_identity import BlockKeys
from specdec.parallel.rank_layout import RankLayout


def test_the_key_of_a_single_rank_stays_as_it_is() -> None:
    """Blocks that are in stores by now would be lost otherwise."""
    keys = BlockKeys("t", "h", "mine", place_of(RankLayout(1, 1), 0))
    assert keys("target", b"\x01") == "mine@t@tp_rank:0@group:target@01"
    assert keys("features", b"\x01") == "mine@t@tp_rank:0@head:h@group:features@01"


@pytest.mark.parametrize(
    ("rank", "layout", "place"),
    [
        (0, RankLayout(1, 1), "tp_rank:0"),
        (1, RankLayout(2, 1), "tp_size:2@tp_rank:1"),
        (1, RankLayout(4, 1), "tp_size:4@tp_rank:1"),
        (0, RankLayout(1, 2), "tp_rank:0@pp_size:2@pp_rank:1"),
        (3, RankLayout(2, 2), "tp_size:2@tp_rank:1@pp_size:2@pp_rank:0"),
    ],
)
def test_a_key_names_the_ranks_place(rank: int, layout: RankLayout, place: str) -> None:
    keys = BlockKeys("t", "h", "", place_of(layout, rank))
    assert keys("target", b"\x01") == f"t@{place}@group:target@01"
    assert keys("head", b"\x01") == f"t@{place}@head:h@group:head@01"
