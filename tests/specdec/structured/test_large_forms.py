"""Forms with many parts: their grammars are compiled in proportion, and follow all of them."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec import StructuredOutputsParams
from tests.specdec.structured.byte_grammars import accepts, compiled, compiler

pytestmark = pytest.mark.slow


def test_alternatives_of_a_pattern_are_all_kept() -> None:
    """A sequence and a choice of the same parts are two alternatives."""
    grammar = compiled({"type": "string", "pattern": "^(ab|(?:a|b))$"})
    assert [text for text in ('"a"', '"b"', '"ab"', '""', '"ba"') if accepts(grammar, text)] == ['"a"', '"b"', '"ab"']


@given(texts=st.sets(st.text(st.sampled_from('ab"\\é'), min_size=1, max_size=6), min_size=1, max_size=30))
def test_a_tree_has_its_texts_alone(texts: set[str]) -> None:
    grammar = compiler().compile(StructuredOutputsParams(choice=sorted(texts)))
    for text in texts:
        assert accepts(grammar, text)
    for text in {text[:-1] for text in texts} | {text + "a" for text in texts} | {""}:
        assert accepts(grammar, text) == (text in texts)


@pytest.mark.long
def test_texts_within_each_other_are_no_deeper_than_a_parser_takes() -> None:
    texts = ["a" * size for size in range(1, 400)]
    grammar = compiler().compile(StructuredOutputsParams(choice=texts))
    assert all(accepts(grammar, text) for text in texts)
    assert not accepts(grammar, "a" * 400)


def optional(count: int) -> dict[str, Any]:
    return {"json": {"type": "object", "properties": {f"prop_{i}": {"type": "string"} for i in range(count)}}}


FORMS: dict[str, Any] = {
    "choice": lambda count: {"choice": [f"choice {i}" for i in range(count)]},
    "enum": lambda count: {"json": {"enum": [f"value {i}" for i in range(count)]}},
}


@pytest.mark.parametrize("name", FORMS)
def test_ten_times_the_texts_take_at_most_twenty_times_as_long(name: str) -> None:
    seconds = []
    for count in (1000, 10_000):
        begin = time.process_time()
        compiler().compile(StructuredOutputsParams(**FORMS[name](count)))
        seconds.append(time.process_time() - begin)
    # Of noise, a tenth of a second.
    assert seconds[1] < 20 * seconds[0] + 0.1


@pytest.mark.long
def test_many_optional_properties_come_in_their_order() -> None:
    count = 300
    schema = optional(count)["json"]
    for needed in ([], ["prop_7"], ["prop_0", "prop_150", "prop_299"]):
        grammar = compiled({**schema, "required": needed})
        for chosen in ([], [7], [0, 7, 150, 299], range(count), range(7, 300, 11), [299], [150, 7]):
            names = [f"prop_{i}" for i in chosen]
            text = json.dumps(dict.fromkeys(names, "x"))
            follows = set(needed) <= set(names) and list(chosen) == sorted(chosen)
            assert accepts(grammar, text) == follows, (needed, chosen)
        assert not accepts(grammar, '{"prop_7": "x", "prop_7": "x"}')


@given(data=st.data())
def test_drawn_properties_come_in_their_order(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.text("ab", max_size=4), unique=True, max_size=12))
    needed = [name for name in names if data.draw(st.booleans())] if data.draw(st.booleans()) else []
    free = data.draw(st.booleans())
    schema = {
        "type": "object",
        "properties": {name: {"type": "null"} for name in names},
        "required": needed,
        "additionalProperties": {"type": "null"} if free else False,
    }
    grammar = compiled(schema)
    chosen = [name for name in names if data.draw(st.booleans())]
    more = ["c"] if data.draw(st.booleans()) else []
    text = json.dumps(dict.fromkeys([*chosen, *more]))
    assert accepts(grammar, text) == (set(needed) <= set(chosen) and (free or not more))
