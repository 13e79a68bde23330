"""Limits of a request's lists: the same of `LLM` and of the server, each with its setting."""

from dataclasses import fields
from typing import Any

import pytest

from specdec import SamplingParams
from specdec.core.request_limits import RequestLimits

LISTS: dict[str, Any] = {
    "max_bad_words": lambda count: {"bad_words": ["a"] * count},
    "max_stop_strings": lambda count: {"stop": ["a"] * count},
    "max_stop_characters": lambda count: {"stop": ["a" * (count - 1), "b"]},
    "max_stop_token_ids": lambda count: {"stop_token_ids": [1] * count},
    "max_logit_bias": lambda count: {"logit_bias": dict.fromkeys(range(count), 1.0)},
    "max_allowed_token_ids": lambda count: {"allowed_token_ids": list(range(count))},
    "max_choices": lambda count: {"choices": [[1]] * count},
}
# Those of texts; see test_text_limits.py.
OF_TEXTS = {"max_bad_word_tokens", "max_choice_characters", "max_text_characters"}


def test_every_limit_is_tested() -> None:
    assert {each.name for each in fields(RequestLimits)} == {*LISTS, *OF_TEXTS}


@pytest.mark.parametrize("name", LISTS)
def test_longer_lists_are_refused_with_the_setting_that_allows_them(name: str) -> None:
    limits = RequestLimits()
    most = getattr(limits, name)
    limits.check(SamplingParams(**LISTS[name](most)))
    longer = SamplingParams(**LISTS[name](most + 1))
    (parameter,) = LISTS[name](2)
    option = f"--{name.replace('_', '-')}"
    with pytest.raises(
        ValueError, match=rf"^{parameter} holds {most + 1}.*at most {most} .* raise {name} \({option}\)$"
    ):
        limits.check(longer)
    RequestLimits(**{name: most + 1}).check(longer)


def test_one_stop_string_is_no_list_of_its_characters() -> None:
    RequestLimits().check(SamplingParams(stop="a" * 100))


def test_nothing_given_is_within_any_limit() -> None:
    RequestLimits(**{each.name: 0 for each in fields(RequestLimits)}).check(SamplingParams())
