"""Texts that cannot fit are refused by their characters: none of them is tokenized."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from specdec import LLM, SamplingParams
from specdec.models.tokenizer import Tokenizer
from tests.new_groups import new_group
from tests.specdec.tiny_checkpoints import Tiny, save_tiny

# Characters of the longest name in the vocabulary, and tokens of the context.
LONGEST, CONTEXT = 5, 64
# One more than fits by its characters.
TOO_LONG = LONGEST * (CONTEXT - 1) + 1


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return save_tiny(tmp_path_factory.mktemp("texts"))


def load(folders: Tiny, **settings: Any) -> LLM:
    return LLM(folders.target, None, max_model_len=CONTEXT, kv_cache_memory=1 << 20, **settings)


@pytest.fixture(scope="module")
def llm(folders: Tiny) -> Iterator[LLM]:
    with load(folders, max_text_characters=2000, max_choice_characters=3000) as made:
        yield made


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All texts that are tokenized."""
    texts: list[str] = []
    encode_batch = Tokenizer.encode_batch

    def recorded(self: Tokenizer, given: Sequence[str], *args: Any, **more: Any) -> list[list[int]]:
        texts.extend(given)
        return encode_batch(self, given, *args, **more)

    monkeypatch.setattr(Tokenizer, "encode_batch", recorded)
    return texts


def params(**given: Any) -> SamplingParams:
    return SamplingParams(max_tokens=1, **given)


def test_prompts_that_cannot_fit_are_not_tokenized(llm: LLM, encoded: list[str]) -> None:
    with pytest.raises(ValueError, match=f"too long: at least {CONTEXT} tokens > {CONTEXT - 1} maximum"):
        llm.generate("a" * TOO_LONG, params(), use_tqdm=False)
    with pytest.raises(ValueError, match="has 2001 characters; at most 2000 are tokenized"):
        llm.generate("a" * 2001, params(truncate_prompt_tokens=4), use_tqdm=False)
    with pytest.raises(ValueError, match="the prompt is too long: at least"):
        llm.generate("a" * TOO_LONG, params(choices=["b"]), use_tqdm=False)
    with pytest.raises(ValueError, match="choices holds one that has, with the prompt, at least 65 tokens"):
        llm.generate("a", params(choices=["b" * (LONGEST * CONTEXT)]), use_tqdm=False)
    with pytest.raises(ValueError, match="the prompt has 50 characters, and with 60 choices 3060; at most 3000"):
        llm.generate("a" * 50, params(choices=["b"] * 60), use_tqdm=False)
    with pytest.raises(ValueError, match="bad_words holds 1025 tokens; at most 1024"):
        llm.generate("a", params(bad_words=["b" * (1024 * LONGEST + 1)]), use_tqdm=False)
    assert not [text for text in encoded if len(text) > LONGEST * CONTEXT]


def test_the_longest_texts_are_taken(llm: LLM) -> None:
    """Refused by their tokens, if at all."""
    with pytest.raises(ValueError, match=f"the prompt is too long: {TOO_LONG - 1} tokens"):
        llm.generate("a" * (TOO_LONG - 1), params(), use_tqdm=False)
    (output,) = llm.generate("a" * 2000, params(truncate_prompt_tokens=4), use_tqdm=False)
    assert len(output.prompt_token_ids or ()) == 4
    with pytest.raises(ValueError, match=r"bad_words holds 1026 tokens; at most 1024 .*max_bad_word_tokens"):
        llm.generate("a", params(bad_words=["ab" * 513]), use_tqdm=False)
    llm.generate("a", params(bad_words=["b" * 8] * 100), use_tqdm=False)


def test_settings_raise_the_limits(folders: Tiny) -> None:
    with load(folders, max_bad_words=200, max_bad_word_tokens=10_000, max_stop_strings=100) as llm:
        words = [f"{number:08}" for number in range(200)]
        llm.generate("a", params(bad_words=words, stop=words[:100]), use_tqdm=False)
        with pytest.raises(ValueError, match="bad_words holds 201; at most 200"):
            llm.generate("a", params(bad_words=[*words, "a"]), use_tqdm=False)


def test_lists_are_prepared_once_for_all_outputs(llm: LLM, encoded: list[str]) -> None:
    given = params(n=4, bad_words=["some", "words"], stop=["one", "two"], prediction="abc")
    first = new_group(llm, "a", given)
    assert sorted(encoded) == sorted([" some", " words", "a", "abc", "some", "words"])
    encoded.clear()
    # As another prompt of the same request.
    second = new_group(llm, "a", given)
    assert sorted(encoded) == ["a", "abc"]
    searches = {id(each.detokenizer._search._automaton) for each in (*first.requests, *second.requests)}  # type: ignore[union-attr]
    assert len(searches) == 1


def test_a_prediction_is_cut_to_the_context(llm: LLM, encoded: list[str]) -> None:
    new_group(llm, "a", params(prediction="b" * 10_000))
    assert max(map(len, encoded)) == LONGEST * CONTEXT


def test_salts_are_short(llm: LLM) -> None:
    llm.generate("a", params(), cache_salt="s" * 1024, use_tqdm=False)
    with pytest.raises(ValueError, match="cache_salt has 1025 characters; it may have at most 1024"):
        llm.generate("a", params(), cache_salt="s" * 1025, use_tqdm=False)
