"""Thinking at an answer's beginning is set apart, however the text is cut into pieces."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.core.reasoning import DeepSeekR1Parser, Qwen3Parser, ReasoningParser
from specdec.openai.reasoning_text import ThinkingText
from specdec.tool_calls.tagged_calls import HermesParser, LlamaParser, Thought, ToolParser
from specdec.tool_calls.tool_call_reader import CallArguments, CallStart
from specdec.tool_calls.tool_parsers import PlainText

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
# Per text: its thinking, its answer, and its call.
CASES: dict[str, tuple[str, str, str]] = {
    "": ("", "", ""),
    "Hm.</think>Yes.": ("Hm.", "Yes.", ""),
    "<think>\nHm.\n</think>\n\nYes.": ("\nHm.\n", "\n\nYes.", ""),
    " <think>Hm.": ("Hm.", "", ""),
    "Hm": ("Hm", "", ""),
    # An end mark that does not come, a start mark that does not come, and marks within the thinking or the answer.
    "Hm</thin": ("Hm</thin", "", ""),
    "<thin": ("<thin", "", ""),
    "a <think> b</think>c </think>": ("a <think> b", "c </think>", ""),
    "a <</think>b": ("a <", "b", ""),
    "<think></think>Yes.": ("", "Yes.", ""),
    f"Hm.</think>\n{CALL}": ("Hm.", "", "f"),
    f"Hm.</think>I call.\n{CALL}": ("Hm.", "I call.", "f"),
    # Qwen3 may leave the mark out.
    f"Hm.\n{CALL}": ("Hm.\n", "", "f"),
}


def read(parser: ThinkingText, pieces: list[str]) -> tuple[str, str, str]:
    items = [item for piece in pieces for item in parser.push(piece)] + parser.finish()
    kinds = ["t" if isinstance(item, Thought) else "a" for item in items]
    assert kinds == sorted(kinds, reverse=True), "thinking comes first"
    assert all(item.text for item in items if isinstance(item, Thought))
    thinking = "".join(item.text for item in items if isinstance(item, Thought))
    answer = "".join(item for item in items if isinstance(item, str))
    return thinking, answer, "".join(item.name for item in items if isinstance(item, CallStart))


@given(text=st.sampled_from(sorted(CASES)), cuts=st.sets(st.integers(0, 90)))
def test_pieces_of_any_size_are_read_as_the_whole(text: str, cuts: set[int]) -> None:
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:stop] for start, stop in itertools.pairwise(places)]
    assert read(ThinkingText(Qwen3Parser, HermesParser(), ends_at_calls=True), pieces) == CASES[text]


@given(text=st.text(alphabet="<>/think a", max_size=40), parser=st.sampled_from([PlainText, HermesParser, LlamaParser]))
def test_no_text_is_lost(text: str, parser: type[ToolParser]) -> None:
    """But for the marks."""
    items = ThinkingText(DeepSeekR1Parser, parser(), ends_at_calls=True)
    found = [*(item for char in text for item in items.push(char)), *items.finish()]
    thinking = "".join(item.text for item in found if isinstance(item, Thought))
    answer = "".join(item for item in found if isinstance(item, str))
    assert not any(isinstance(item, CallStart | CallArguments) for item in found)
    begun = text.lstrip().removeprefix("<think>") if text.lstrip().startswith("<think>") else text
    before, mark, after = begun.partition("</think>")
    assert (thinking, answer) == (before, after if mark else "")


def test_before_an_answer_with_a_form_only_the_mark_ends_the_thinking() -> None:
    text = f"Hm.\n{CALL}"
    assert read(ThinkingText(Qwen3Parser, HermesParser(), ends_at_calls=False), [text]) == (text, "", "")
    # So it is with models that always write their mark.
    assert read(ThinkingText(DeepSeekR1Parser, HermesParser(), ends_at_calls=True), [text]) == (text, "", "")


@pytest.mark.parametrize(("parser", "off"), [(Qwen3Parser, True), (DeepSeekR1Parser, False), (ReasoningParser, False)])
def test_thinking_is_switched_off_as_in_vllm(parser: type[ReasoningParser], off: bool) -> None:
    assert parser.is_enabled({"enable_thinking": False}) is not off
    assert parser.is_enabled({"enable_thinking": True})
    assert parser.is_enabled({})
