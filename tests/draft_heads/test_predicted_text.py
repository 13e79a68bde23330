"""A cursor that follows the output through a predicted text."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.draft_heads.drafting.chains import ChainRates
from specdec.draft_heads.drafting.predicted_text import MOST_PLACES, NEAR, PredictedText
from tests.strategies import seeds

PROMPT = [7, 7, 8]


def foretold(prediction: list[int], output: list[int], chunk: int = 1) -> tuple[int, PredictedText]:
    """Return how many tokens of the output were the first of the chain before them, and the cursor behind it."""
    source, hits = PredictedText(prediction, len(PROMPT), ChainRates()), 0
    for end in range(0, len(output), chunk):
        chains = source.chains(PROMPT + output[:end], 4)
        hits += bool(chains) and chains[0].tokens[0] == output[end]
    source.follow(PROMPT + output)
    return hits, source


def text(size: int, seed: int = 0, vocab: int = 30) -> list[int]:
    """Tokens of which many occur several times, as in a program."""
    chance = random.Random(seed)
    return [chance.randrange(vocab) for _ in range(size)]


def test_an_equal_text_is_foretold_to_its_end() -> None:
    own = text(100)
    hits, source = foretold(own, own)
    assert hits == 100
    assert (source.num_accepted, source.num_rejected) == (100, 0)
    assert source.chains(PROMPT + own, 4) == []


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("removed", "inserted"),
    [(0, 1), (0, 7), (1, 0), (9, 0), (40, 0), (1, 1), (1, 3), (5, 2), (12, 12)],
)
def test_nearly_all_behind_an_edit_is_foretold(removed: int, inserted: int, seed: int) -> None:
    prediction = text(200, seed)
    # Tokens that the prediction does not have.
    output = [*prediction[:80], *range(100, 100 + inserted), *prediction[80 + removed :]]
    hits, source = foretold(prediction, output)
    # All but the inserted tokens, the one that shows the edit, and one or two that show the place.
    assert hits >= len(output) - inserted - 3
    # Of the removed tokens a few may equal others that the cursor passes.
    assert 200 - removed <= source.num_accepted <= 200 - removed + 3
    assert source.num_accepted + source.num_rejected == 200


def test_many_edits_in_one_text() -> None:
    chance, prediction = random.Random(3), text(600)
    output, edits = [], 0
    for token in prediction:
        kind = chance.random()
        edits += kind < 0.06
        if kind < 0.02:
            output += [chance.randrange(30), token]
        elif kind >= 0.04:
            output.append(token)
        elif kind >= 0.02:
            output.append(chance.randrange(30))
    hits, _ = foretold(prediction, output)
    assert hits >= len(output) - 4 * edits


def test_the_nearest_of_equal_places_is_taken() -> None:
    body = [1, 2, 3, 4, 5]
    prediction = [*body, 9, *body, 10, *body, 11]
    # Behind the second body, so what follows is 10 although 3 4 5 occurs three times.
    _, source = foretold(prediction, [*body, 9, 1, 20, 3, 4, 5])
    assert source.chains([*PROMPT, *body, 9, 1, 20, 3, 4, 5], 1)[0].tokens == [10]


def test_a_single_token_far_away_does_not_move_the_cursor() -> None:
    prediction = [*range(50, 60), *[1] * (NEAR + 5), 90, 91]
    _, source = foretold(prediction, [*range(50, 60), 90])
    assert source.chains([*PROMPT, *range(50, 60), 90], 1)[0].tokens == [1]
    _, source = foretold(prediction, [*range(50, 60), 90, 91])
    assert source.num_accepted == 12


def test_a_text_of_one_token_takes_no_time() -> None:
    """Every place matches; only some are compared."""
    prediction = [4] * 20_000
    source = PredictedText(prediction, 0, ChainRates())
    compared = []
    places = source._places[4]
    source._places[4] = type("Places", (list,), {"__getitem__": lambda _, key: compared.append(key) or places[key]})(
        places
    )
    source.follow([5, 4, 5, 4])
    assert all(key.stop - key.start <= MOST_PLACES for key in compared if isinstance(key, slice))


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 4), max_size=40), seeds)
def test_any_output_in_any_pieces(prediction: list[int], output: list[int], seed: int) -> None:
    """The cursor depends on the output alone, not on how it came; counts are those of tokens that both have."""
    chance, ends = random.Random(seed), list(range(1, 1 + len(output)))
    some = sorted({*chance.sample(ends, chance.randint(0, len(ends))), len(output)})
    pieces, whole = (PredictedText(prediction, len(PROMPT), ChainRates()) for _ in range(2))
    for end in some:
        pieces.follow(PROMPT + output[:end])
    known = PROMPT + output
    assert pieces.chains(known, 5) == [chain._replace(rates=pieces.rates) for chain in whole.chains(known, 5)]
    assert pieces.num_accepted == whole.num_accepted <= sum(token in output for token in prediction)
    assert pieces.num_accepted + pieces.num_rejected == len(prediction)
