"""Stop strings of special tokens, which are no part of the text."""

import pytest

from specdec import LLM, SamplingParams
from specdec.core.step_report import StepReporter
from specdec.text.detokenizer import Detokenizer
from specdec.text.stop_strings import special_in_stops
from tests.specdec.metaspace_llama import TOKENIZER, ids, save_metaspace

END, IM_END, THINK = ids("</s>", "<|im_end|>", "<think>")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = tmp_path_factory.mktemp("metaspace") / "target"
    save_metaspace(path)
    return LLM(path, None, dtype="float64", device="cpu", kv_cache_memory=8 << 20)


def push_all(pieces: str, stops: list[str], **options: bool) -> tuple[int, Detokenizer, str]:
    """Return how many tokens it took to stop, or 0; and what was shown by then."""
    special = special_in_stops(TOKENIZER, stops)
    detokenizer = Detokenizer(TOKENIZER, stops, prompt=ids("▁hello"), special_stops=special, **options)  # type: ignore[arg-type]
    shown, count = "", 0
    for place, token in enumerate(ids(*pieces.split()), 1):
        stopped = detokenizer.push(token, False)
        shown += "".join(segment.text for segment in detokenizer.segments(final=stopped))
        assert detokenizer.text.startswith(shown)
        if stopped:
            count = place
            break
    shown += "".join(segment.text for segment in detokenizer.segments(final=True))
    assert shown == detokenizer.text
    return count, detokenizer, shown


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    ("pieces", "stop", "count", "text", "included"),
    [
        ("▁world <|im_end|> ▁cat", "<|im_end|>", 2, " world", " world<|im_end|>"),
        ("▁world <|im_end|> ▁cat", "world<|im_end|>", 2, " ", " world<|im_end|>"),
        ("▁world <|im_end|> ▁cat", "<|im_end|> c", 3, " world", " world<|im_end|> c"),
        ("▁world <|im_end|> </s> ▁cat", "d<|im_end|></s> ", 4, " worl", " world<|im_end|></s> "),
        ("▁world <|im_end|> ▁cat s", "cats", 4, None, None),
        # No stop string: the token before is another, or nothing follows.
        ("▁world <think> ▁cat", "world<|im_end|>", 0, None, None),
        ("▁cat <|im_end|> ▁cat", "world<|im_end|>", 0, None, None),
        ("▁world <|im_end|>", "<|im_end|> c", 0, None, None),
        ("▁world ▁cat", "<|im_end|>", 0, None, None),
    ],
)
def test_a_stop_string_of_special_tokens_and_text(
    pieces: str, stop: str, count: int, text: str | None, included: str | None, skip: bool
) -> None:
    found, detokenizer, shown = push_all(pieces, [stop], skip_special=skip)
    assert found == count
    assert detokenizer.matched == (stop if count else None)
    if text is not None:
        assert shown == text
        assert push_all(pieces, [stop], skip_special=skip, include_stop=True)[2] == included
    elif not count:
        tokens = ids(*pieces.split())
        assert shown == TOKENIZER.decode([*ids("▁hello"), *tokens], skip_special_tokens=skip).removeprefix("hello")


def test_a_special_token_that_is_not_in_a_stop_string_does_not_part_it() -> None:
    assert push_all("▁world <think> ▁cat", ["world cat"])[0] == 3


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("token", [END, IM_END, THINK])
@pytest.mark.parametrize("ignore", [False, True])
def test_a_stop_string_that_is_a_special_token_ends_the_output(
    llm: LLM, token: int, include: bool, ignore: bool
) -> None:
    stop = TOKENIZER.id_to_token(token)
    params = SamplingParams(
        max_tokens=4,
        ignore_eos=ignore,
        stop=["nothing", stop],
        allowed_token_ids=[token],
        include_stop_str_in_output=include,
    )
    *_, output = llm.stream("hello", params, trace=True)
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert output.token_ids == [token]
    assert output.text == (stop if include else "")
    assert "".join(segment.text for state in [output] for segment in state.segments) == output.text
    steps = StepReporter(TOKENIZER, params).new_steps(output.outputs[0])
    assert "".join(piece.text for step in steps for piece in step.pieces) == output.text


def test_it_is_not_generated_before_the_least_tokens(llm: LLM) -> None:
    """As with stop tokens."""
    params = SamplingParams(
        min_tokens=3, max_tokens=9, stop="<|im_end|>", allowed_token_ids=ids("<|im_end|>", "▁x"), seed=1
    )
    (output,) = llm.generate("hello", params)
    assert output.text.startswith(" x x x")
    assert IM_END not in output.token_ids[:3]


def test_kept_special_tokens_are_text_and_others_are_not(llm: LLM) -> None:
    params = SamplingParams(
        # As good as all three alike.
        temperature=100.0,
        max_tokens=24,
        seed=2,
        ignore_eos=True,
        allowed_token_ids=[THINK, END, *ids("▁cat")],
        kept_special_tokens=[THINK],
    )
    (output,) = llm.generate("hello", params)
    kept = [token for token in output.token_ids if token != END]
    assert {THINK, END} <= set(output.token_ids)
    whole = TOKENIZER.decode([*ids("▁hello"), *kept], skip_special_tokens=False)
    assert output.text == whole.removeprefix("hello")
