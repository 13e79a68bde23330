"""Sampling parameters, and the errors of values outside their range."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from specdec import LLM, SamplingParams
from tests.fakes import save_random_llama
from tests.new_groups import new_group
from tests.specdec.tiny_checkpoints import Tiny

NAN, INF = math.nan, math.inf
TOP_P = "above 0 and at most 1"
SHARE = "at least 0 and at most 1"
PENALTY = "at least -2 and at most 2"
COUNT = "0 or more, or -1 for all tokens"


def refused(name: str, values: list[object], wanted: str) -> list[tuple[dict[str, object], str]]:
    """Per value the arguments and the message that names all three."""
    return [({name: value}, f"{name} is {value!r}; it must be {wanted}") for value in values]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        *refused("n", [0, -3, 16385], "at least 1 and at most 16384"),
        *refused("temperature", [-0.1, NAN, INF, -INF], "0 or more and finite"),
        *refused("top_p", [0.0, -0.5, 1.0001, NAN, INF], TOP_P),
        *refused("top_k", [-2], "at least 1, or 0 or -1 for all tokens"),
        *refused("min_p", [-0.1, 1.1, NAN, INF], SHARE),
        *refused("repetition_penalty", [0.0, -1.0, NAN, INF], "above 0 and finite"),
        *refused("presence_penalty", [-2.1, 2.1, NAN, INF, -INF], PENALTY),
        *refused("frequency_penalty", [-2.1, 2.1, NAN, INF, -INF], PENALTY),
        *refused("allowed_token_ids", [[], ()], "not empty"),
        *refused("seed", [-2, 1 << 63], "between 0 and 2^63 - 1, or -1 for a drawn one"),
        *refused("max_tokens", [0, -1], "at least 1"),
        *refused("min_tokens", [-1], "0 or more"),
        *refused("logprobs", [-2], COUNT),
        *refused("prompt_logprobs", [-2], COUNT),
        *(
            case
            for name in ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
            for case in refused(name, [NAN, INF, 1.5, "3"], "a whole number")
        ),
        *(
            case
            for name in ("n", "top_k", "seed", "max_tokens", "min_tokens")
            for case in refused(name, [True], "a whole number")
        ),
        *(
            case
            for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")
            for case in refused(name, ["1", True, [0.5]], "a number")
        ),
        *refused("stop", [[1], b"ab", 5, True], "text, or a list of texts"),
        *refused("min_tokens", [10**30], "below 2^63"),
        *(
            case
            for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
            for case in refused(name, ["no", 1, None], "True or False")
        ),
        *(
            case
            for name in ("allowed_token_ids", "stop_token_ids")
            for case in refused(name, [5], "a list of token ids")
        ),
        (
            {"stop": ["a", "b\ud800"]},
            "stop is not valid text: its character 1 is half of a pair, or a byte that is no UTF-8",
        ),
        (
            {"bad_words": ["\udcff"]},
            "bad_words is not valid text: its character 0 is half of a pair, or a byte that is no UTF-8",
        ),
        *refused("bad_words", [[1]], "text, or a list of texts"),
        *refused("speculation", [None, False, {"enabled": False}], "Speculation(enabled, max_nodes, max_depth)"),
        ({"min_tokens": 17}, "min_tokens is 17; it must be at most max_tokens, 16"),
        ({"min_tokens": 4, "max_tokens": 3}, "min_tokens is 4; it must be at most max_tokens, 3"),
        *(
            (
                {"logit_bias": {3: 1.0, 7: value}},
                f"logit_bias of token 7 is {value!r}; it must be at least -100 and at most 100",
            )
            for value in (-100.1, 100.1, NAN, INF, -INF, "1")
        ),
        *(
            ({"stop": value}, "stop holds an empty string; leave it out or give at least one character")
            for value in ("", [""], ["a", ""])
        ),
        *(
            ({"bad_words": value}, f"bad_words is {value!r}; it must be a list of words that are not empty")
            for value in ("word", [""], ["a", " \n"])
        ),
        *(
            ({"n": 2, "temperature": value}, "n is 2; at temperature 0 all outputs are the same, so it must be 1")
            for value in (0.0, 9e-6)
        ),
    ],
)
def test_a_bad_value_is_named_with_its_range(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message) + "$"):
        SamplingParams(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "values",
    [
        {"n": 1, "temperature": 0.0},
        {"n": 5, "temperature": 1e-5},
        {"temperature": 0},
        {"temperature": 1e30},
        {"top_p": 1},
        {"top_p": 1e-9},
        *({"top_k": value} for value in (-1, 0, 1, 1 << 40)),
        *({"min_p": value} for value in (0, 1)),
        *({"repetition_penalty": value} for value in (1e-3, 1, 50)),
        *({name: value} for name in ("presence_penalty", "frequency_penalty") for value in (-2, 2)),
        {"logit_bias": {0: -100, 1: 100}},
        {"logit_bias": {}},
        {"allowed_token_ids": [0]},
        {"allowed_token_ids": range(3)},
        {"bad_words": []},
        {"bad_words": (" a",)},
        *({"seed": value} for value in (None, 0, (1 << 63) - 1)),
        *({"max_tokens": value} for value in (None, 1)),
        {"min_tokens": 16},
        {"min_tokens": 1 << 40, "max_tokens": None},
        *({name: value} for name in ("logprobs", "prompt_logprobs") for value in (None, -1, 0, 1)),
        *({"stop": value} for value in (None, [], " ", ("a", "b"))),
    ],
)
def test_values_at_the_edge_are_taken(values: dict[str, object]) -> None:
    params = SamplingParams(**values)  # type: ignore[arg-type]
    assert {name: getattr(params, name) for name in values} == values


def test_numbers_of_numpy_are_taken() -> None:
    """Numbers become Python's; ids in a list may stay numpy's, as they are equal to Python's."""
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        max_tokens=np.int64(3),  # type: ignore[arg-type]
        stop_token_ids=np.array([5, 6]),  # type: ignore[arg-type]
        allowed_token_ids=[np.int64(5), 7],  # type: ignore[list-item]
        logit_bias={np.int64(5): np.float64(1.0)},  # type: ignore[dict-item]
    )
    assert [type(value) for value in (params.temperature, params.max_tokens)] == [float, int]
    assert params.stop_token_ids == [5, 6]
    params.check_tokens(8)
    with pytest.raises(ValueError, match="allowed_token_ids holds 7; token ids lie between 0 and 6"):
        params.check_tokens(7)


@pytest.mark.parametrize(
    ("stop", "strings"),
    [(None, ()), ("ab", ("ab",)), (["ab", "c"], ("ab", "c")), ([], ())],
)
def test_stop_is_one_string_or_several(stop: str | list[str] | None, strings: tuple[str, ...]) -> None:
    assert SamplingParams(stop=stop).stop_strings == strings


FOREIGN: list[tuple[dict[str, object], str]] = [
    *(
        ({name: [*taken, token]}, f"{name} holds {token!r}; token ids lie between 0 and 96")
        for name in ("allowed_token_ids", "stop_token_ids")
        for taken, token in (([0, 96], 97), ([], -1), ([5], "5"), ([], True), ([], 1.0), ([], None))
    ),
    *(
        ({"logit_bias": {0: 1.0, 96: 1.0, token: 1.0}}, f"logit_bias holds {token!r}; token ids lie between 0 and 96")
        for token in (97, -1, "3")
    ),
    *(
        ({name: 98}, f"{name} is 98; it must be at most the vocabulary's 97")
        for name in ("logprobs", "prompt_logprobs")
    ),
]


@pytest.mark.parametrize(("values", "message"), FOREIGN)
def test_tokens_outside_the_vocabulary_are_named(values: dict[str, object], message: str) -> None:
    params = SamplingParams(**values)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=re.escape(message) + "$"):
        params.check_tokens(97)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"logit_bias": {0: 1.0, 96: 1.0}, "allowed_token_ids": [0, 96], "stop_token_ids": (96, 0)},
        {"logprobs": 97, "prompt_logprobs": 97},
        {"logprobs": -1, "prompt_logprobs": -1},
    ],
)
def test_all_of_the_vocabulary_may_be_asked_for(values: dict[str, object]) -> None:
    SamplingParams(**values).check_tokens(97)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A model of 97 tokens without a tokenizer."""
    folder: Path = tmp_path_factory.mktemp("bare")
    save_random_llama(folder)
    return LLM(folder, draft=None, dtype="float64", device="cpu")


def refuses(llm: LLM, params: SamplingParams, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """See that no request of the batch runs, not even those that nothing is wrong with."""

    def step() -> None:
        raise AssertionError("a step was taken")

    monkeypatch.setattr(llm.engine, "step", step)
    with pytest.raises(ValueError, match=re.escape(message)):
        new_group(llm, [3, 4], params)
    with pytest.raises(ValueError, match=re.escape(message)):
        llm.generate([[3, 4], [5]], [SamplingParams(), params])
    assert not llm.engine.has_unfinished
    assert llm.engine.scheduler.stats().kv_usage == 0


@pytest.mark.parametrize(("values", "message"), FOREIGN)
def test_nothing_runs_beside_what_the_vocabulary_lacks(
    bare: LLM, values: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses(bare, SamplingParams(**values), message, monkeypatch)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stop": "ab"}, "stop needs a tokenizer, and the model's folder has none; use token ids"),
        ({"bad_words": ["ab"]}, "bad_words needs a tokenizer, and the model's folder has none; use token ids"),
    ],
)
def test_words_need_a_tokenizer(
    bare: LLM, tiny: Tiny, values: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(**values)  # type: ignore[arg-type]
    refuses(bare, params, message, monkeypatch)
    group = new_group(LLM(tiny.target, draft=None, dtype="float64", device="cpu"), [3, 4], params)
    assert len(group.requests) == 1
