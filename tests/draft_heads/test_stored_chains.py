"""Chains from earlier texts."""

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.draft_heads.drafting.chains import Chain, ChainRates, ChainTree
from specdec.draft_heads.drafting.ngram_chains import NGramChains
from specdec.draft_heads.drafting.stored_chains import STRIDE, DraftStore, StoredText
from specdec.kernels.reference.text_store import PythonTextStore
from specdec.kernels.types.text_store import PAGE
from tests.profiles import num_cases

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


def make(tokens: int = 1 << 12, most: int = 3) -> DraftStore:
    return DraftStore(PythonTextStore(tokens), most)


def source(store: DraftStore, *owner: str | None) -> StoredText:
    return store.open(owner, NGramChains(store.most, ChainRates()))


def told(store: DraftStore, text: list[int], *owner: str | None) -> StoredText:
    one = source(store, *owner)
    one.follow(text, 0, ended=True)
    return one


def found(one: StoredText, text: list[int], depth: int = 4) -> list[tuple[list[int], int]]:
    return [(list(chain.tokens), chain.match) for chain in one.chains(text, depth)]


def test_what_followed_in_an_earlier_text_follows() -> None:
    store = make()
    told(store, TEXT, "a")
    assert found(source(store, "a"), [0, *TEXT[:9]]) == [(TEXT[9:13], 9)]
    assert found(source(store, "a"), [8, 9]) == [(TEXT[13:17], 2)]


def test_its_own_text_is_searched_too_and_the_longer_match_comes_first() -> None:
    store = make()
    told(store, [1, 2, 3, 4, 5, 6], "a")
    text = [4, 5, 7, 0, 1, 2, 3, 4, 5]
    assert found(source(store, "a"), text, 1) == [([6], 5), ([7], 2)]
    # Of equal matches its own.
    assert found(source(store, "a"), [2, 3, 9, 2, 3], 1) == [([9], 2), ([4], 2)]


def test_rates_of_matches_are_measured_over_requests() -> None:
    """Where the store is never right, its chains are worth little."""
    store = make()
    told(store, TEXT, "a")
    values = []
    for _ in range(30):
        tree = ChainTree(source(store, "a").chains(TEXT[:6], 4))
        values.append(tree.values[0])
        tree.learn([0])
    assert values[0] > 0.6
    assert values[-1] < 0.1


def test_the_corpus_is_for_all() -> None:
    store = make()
    store.add_corpus(TEXT)
    for owner in ("a", "b", None):
        assert found(source(store, owner), TEXT[:5], 2) == [(TEXT[5:7], 5)]


def test_owners_are_told_apart_in_all_parts() -> None:
    store = make()
    owners: list[tuple[str | None, ...]] = [
        ("a", None), (None, "a"), ("a", "a"), (None, None), ("None", None), ("a", ""), ("\ud800", "a"),
    ]  # fmt: skip
    for number, owner in enumerate(owners):
        told(store, [*TEXT, 100 + number], *owner)
    for number, owner in enumerate(owners):
        assert found(source(store, *owner), TEXT) == [([100 + number], len(TEXT))]


def test_a_running_text_is_written_by_strides() -> None:
    store, text = make(), list(range(100))
    one, other = source(store, "a"), source(store, "a")
    one.follow(text[:20], 0, ended=False)
    assert found(other, text[:15], 99) == [(text[15:20], 15)]
    one.follow(text[: 19 + STRIDE], 0, ended=False)
    assert found(other, text[:15], 99) == [(text[15:20], 15)]
    one.follow(text[: 20 + STRIDE], 0, ended=False)
    assert found(other, text[:15], 99) == [(text[15 : 20 + STRIDE], 15)]
    one.follow(text[: 22 + STRIDE], 0, ended=True)
    assert found(other, text[:15], 99) == [(text[15 : 22 + STRIDE], 15)]
    # What came in several stretches is one text.
    assert [match for _, match in found(other, text[: 20 + STRIDE], 1)] == [32]


def test_of_a_cached_prompt_its_end_alone_is_written() -> None:
    store, text = make(), list(range(100))
    source(store, "a").follow(text, 60, ended=True)
    assert found(source(store, "a"), text[:40]) == []
    assert found(source(store, "a"), text[:60], 3) == [(text[60:63], 16)]


def test_what_was_useful_stays_longest() -> None:
    """Two texts are found; what the first foretells comes, and what the second foretells does not."""
    store, texts = make(6 * PAGE), [[100 * number + place for place in range(PAGE)] for number in range(6)]
    for text in texts[:4]:
        told(store, text, "a")
    for text, after in ((texts[0], texts[0][20]), (texts[1], 7)):
        reader = source(store, "a")
        assert found(reader, text[:20]) == [(text[20:24], 20)]
        # Its own text takes a page.
        reader.follow([*text[:20], after], 0, ended=True)
    for text in texts[4:]:
        told(store, text, "a")
    kept = [bool(found(source(store, "a"), text[22:30])) for text in texts]
    assert kept == [True, False, False, True, True, True]


owners = st.sampled_from([("a", None), ("b", None), ("a", "lora"), (None, None)])
events = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(["grow", "grow", "search"]), st.integers(1, 40)), max_size=40
)


@settings(max_examples=num_cases(100))
@given(
    given_owners=st.lists(owners, min_size=6, max_size=6),
    events=events,
    pages=st.integers(1, 30),
    seed=st.integers(0, 1 << 30),
)
def test_no_owner_finds_what_another_wrote(given_owners: list[Any], events: list[Any], pages: int, seed: int) -> None:
    """Texts are of letters that all owners write, with marks of their own between them."""
    store, chance = make(pages * PAGE), random.Random(seed)
    marks = {owner: 100 + number for number, owner in enumerate(dict.fromkeys(given_owners))}
    sources, texts = [source(store, *owner) for owner in given_owners], [list[int]() for _ in given_owners]
    for which, kind, count in events:
        owner, text = given_owners[which], texts[which]
        if kind == "grow":
            for _ in range(count):
                text.append(marks[owner] if chance.random() < 0.1 else chance.randrange(2))
            sources[which].follow(text, 0, ended=False)
        elif text:
            chains: list[Chain] = sources[which].chains(text, count)
            assert {token for chain in chains for token in chain.tokens} <= {0, 1, marks[owner]}
