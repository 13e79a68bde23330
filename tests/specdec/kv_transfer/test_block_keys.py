"""Names of blocks in stores."""

from specdec.kv_transfer.cache_identity import BlockKeys


def test_the_key_of_a_single_rank_stays_as_it_is() -> None:
    """Blocks that are in stores by now would be lost otherwise."""
    keys = BlockKeys("t", "h", "mine")
    assert keys("target", b"\x01") == "mine@t@tp_rank:0@group:target@01"
    assert keys("features", b"\x01") == "mine@t@tp_rank:0@head:h@group:features@01"


def test_a_key_names_the_rank_and_their_number() -> None:
    assert BlockKeys("t", "h", rank=1, num_ranks=2)("target", b"\x01") == "t@tp_size:2@tp_rank:1@group:target@01"
    assert BlockKeys("t", "h", rank=1, num_ranks=4)("head", b"\x01") == "t@tp_size:4@tp_rank:1@head:h@group:head@01"
