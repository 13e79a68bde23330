"""vLLM's sampling parameters and fields of outputs."""

import re
import time
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from specdec import LLM, BeamSearchParams, RequestOutputKind, SamplingParams, Speculation, StructuredOutputsParams
from specdec.core.sampling_params import FOREIGN_SAMPLING
from specdec.text.detokenizer import Detokenizer

pytestmark = pytest.mark.slow

FREE: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SamplingParams(max_token=3), "SamplingParams has no 'max_token'; the nearest it has is 'max_tokens'"),
        (lambda: SamplingParams(1, 2, *range(60)), "SamplingParams: too many positional arguments"),
        (
            lambda: SamplingParams(logits_processors=[print]),
            "logits_processors is [<built-in function print>], which is not supported; use logit_bias, "
            "allowed_token_ids, bad_words or structured_outputs",
        ),
        (
            lambda: SamplingParams(best_of=3),
            "best_of is 3, which is not supported; use n, and choose",
        ),
        (
            lambda: SamplingParams(output_kind="DELTA"),
            "output_kind is 'DELTA'; it must be RequestOutputKind.",
        ),
        (lambda: SamplingParams(truncate_prompt_tokens=0), "truncate_prompt_tokens is 0; it must be at least 1"),
        (
            lambda: SamplingParams(truncate_prompt_tokens=-2),
            "truncate_prompt_tokens is -2; it must be at least 1",
        ),
        (lambda: SamplingParams(stop="x", detokenize=False), "stop needs detokenize; use stop_token_ids"),
        (lambda: Speculation(max_node=2), "Speculation has no 'max_node'; the nearest it has is 'max_nodes'"),
        (
            lambda: StructuredOutputsParams(jsn="{}"),
            "StructuredOutputsParams has no 'jsn'; the nearest",
        ),
        (
            lambda: StructuredOutputsParams(structural_tag="x"),
            "structural_tag is 'x', which is not supported; use",
        ),
        (lambda: BeamSearchParams(4), "BeamSearchParams: missing a required argument: 'max_tokens'"),
        (lambda: BeamSearchParams(4, 8, temperature=0.5), "temperature is 0.5, which is not supported; a beam search"),
    ],
)
def test_unknown_parameters_are_one_line(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as caught:
        make()
    assert "\n" not in str(caught.value)


def test_values_that_ask_for_nothing_are_taken() -> None:
    values: dict[str, Any] = dict.fromkeys(FOREIGN_SAMPLING)
    assert SamplingParams(**values, bad_words=None) == SamplingParams()  # type: ignore[arg-type]
    values = {"logits_processors": [], "best_of": 1, "use_beam_search": False, "extra_args": {}}
    assert SamplingParams(**values) == SamplingParams()
    more: dict[str, Any] = {"temperature": 0.0, "include_stop_str_in_output": False}
    assert BeamSearchParams(2, 3, **more) == BeamSearchParams(2, 3)


# The fields of vLLM's `SamplingParams`, now or once, and the values by which each asks for nothing.
DEFAULTS: dict[str, list[Any]] = {
    **{name: [0, 0.0] for name in ("presence_penalty", "frequency_penalty", "min_p")},
    **{name: [1, 1.0] for name in ("repetition_penalty", "temperature", "top_p", "length_penalty")},
    **{name: [None, []] for name in ("stop", "stop_token_ids", "bad_words", "logits_processors")},
    **{name: [None, {}] for name in ("logit_bias", "extra_args")},
    **{name: [None, False] for name in ("logprobs", "prompt_logprobs", "skip_reading_prefix_cache")},
    **{name: [None, 1] for name in ("best_of", "stream_interval")},
    **{name: [True] for name in ("detokenize", "skip_special_tokens", "spaces_between_special_tokens")},
    **{name: [0] for name in ("min_tokens", "routed_experts_prompt_start", "output_text_buffer_length")},
    **{
        name: [False]
        for name in (
            "ignore_eos",
            "include_stop_str_in_output",
            "flat_logprobs",
            "skip_clone",
            "use_beam_search",
            "early_stopping",
        )
    },
    **{
        name: [None]
        for name in (
            "structured_outputs",
            "guided_decoding",
            "allowed_token_ids",
            "logprob_token_ids",
            "prompt_logprob_token_ids",
            "prompt_logprob_start",
            "repetition_detection",
            "trace_decode_token_ids",
            "truncate_prompt_tokens",
        )
    },
    **{"n": [1], "top_k": [0, -1], "seed": [None, -1], "max_tokens": [16], "thinking_token_budget": [None, -1]},
    "output_kind": [RequestOutputKind.CUMULATIVE],
}


@pytest.mark.long
def test_defaults_of_every_field_ask_for_nothing(llm: LLM) -> None:
    plain = SamplingParams(seed=3)
    expected = llm.generate("ab", plain)[0].outputs[0]
    for name, values in DEFAULTS.items():
        for value in values:
            params = SamplingParams(**({"seed": 3} | {name: value}))
            if name == "seed":
                assert params.seed is None
                continue
            found = llm.generate("ab", params)[0].outputs[0]
            assert (found.token_ids, found.text, found.logprobs) == (expected.token_ids, expected.text, None), name
    # All at once.
    every = SamplingParams(**({name: values[-1] for name, values in DEFAULTS.items()} | {"seed": 3}))
    assert llm.generate("ab", every)[0].token_ids == expected.token_ids


def test_another_value_of_a_field_that_is_not_supported_is_refused() -> None:
    for name in FOREIGN_SAMPLING:
        with pytest.raises(ValueError, match=f"^{name} is 'x', which is not supported; "):
            SamplingParams(**{name: "x"})  # type: ignore[arg-type]


def test_a_seed_of_minus_one_is_none(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, seed=-1, max_tokens=12, ignore_eos=True)
    assert params.seed is None
    # Each request draws its own.
    assert len({tuple(output.token_ids) for output in llm.generate(["ab"] * 3, params)}) == 3
    params.seed = 4
    params.seed = -1
    assert params.seed is None


def test_log_probabilities_may_be_asked_for_by_true() -> None:
    assert SamplingParams(logprobs=True, prompt_logprobs=True) == SamplingParams(logprobs=1, prompt_logprobs=1)


def test_fields_may_be_assigned_and_are_checked() -> None:
    params = SamplingParams(max_tokens=4)
    params.max_tokens, params.stop = 9, ["x"]
    assert params == SamplingParams(max_tokens=9, stop=["x"])
    with pytest.raises(ValueError, match="n is 0; it must be at least 1"):
        params.n = 0
    with pytest.raises(ValueError, match="min_tokens is 10; it must be at most max_tokens, 9"):
        params.min_tokens = 10
    with pytest.raises(ValueError, match="SamplingParams has no 'max_token'; the nearest it has is 'max_tokens'"):
        params.max_token = 3
    assert params == SamplingParams(max_tokens=9, stop=["x"])


def test_a_request_keeps_what_it_began_with(llm: LLM) -> None:
    params = SamplingParams(**FREE)
    states = llm.stream("ab", params)
    next(states)
    params.max_tokens = 2
    *_, last = states
    assert len(last.token_ids) == 12


def test_without_text(llm: LLM) -> None:
    text = llm.generate("ab", SamplingParams(**FREE, logprobs=1))[0]
    ids = llm.generate("ab", SamplingParams(**FREE, logprobs=1, detokenize=False))[0]
    assert (ids.text, ids.segments, ids.token_ids) == ("", [], text.token_ids)
    assert len(text.text) == 12
    assert ids.outputs[0].logprobs is not None
    assert {entry.decoded_token for entries in ids.outputs[0].logprobs for entry in entries.values()} == {None}


def test_the_last_tokens_of_a_prompt(llm: LLM) -> None:
    short = llm.generate("cdef", SamplingParams(**FREE))[0]
    cut = llm.generate("abcdef", SamplingParams(**FREE, truncate_prompt_tokens=4))[0]
    assert (cut.prompt, cut.prompt_token_ids) == ("abcdef", short.prompt_token_ids)
    assert cut.token_ids == short.token_ids
    whole = llm.generate("abcdef", SamplingParams(**FREE, truncate_prompt_tokens=400))[0]
    assert len(whole.prompt_token_ids) == 6
    most = llm.max_model_len
    longest = llm.generate([5] * (most + 3), SamplingParams(**FREE, truncate_prompt_tokens=-1))[0]
    assert (len(longest.prompt_token_ids), len(longest.token_ids)) == (most - 1, 1)


@pytest.mark.parametrize(("spaced", "text"), [(True, "<x> <y> a <x>"), (False, "<x><y> a <x>")])
def test_spaces_between_special_tokens(spaced: bool, text: str) -> None:
    """A tokenizer without a decoder writes a space between all tokens."""
    backend = Tokenizer(WordLevel({"a": 0}))
    backend.add_special_tokens(["<x>", "<y>"])
    detokenizer = Detokenizer(backend, (), skip_special=False, spaced_special=spaced)
    for token in (1, 2, 0, 1):
        detokenizer.push(token, accepted=False)
    assert detokenizer.text == text


@pytest.mark.long
def test_kinds_of_output(llm: LLM) -> None:
    whole = llm.generate("ab", SamplingParams(**FREE, logprobs=0))[0]
    deltas = list(llm.stream("ab", SamplingParams(**FREE, logprobs=0, output_kind=RequestOutputKind.DELTA)))
    assert len(deltas) > 1
    assert [token for state in deltas for token in state.token_ids] == whole.token_ids
    assert "".join(state.text for state in deltas) == whole.text
    assert [one for state in deltas for one in state.outputs[0].logprobs or []] == whole.outputs[0].logprobs
    assert [flag for state in deltas for flag in state.outputs[0].accepted] == whole.outputs[0].accepted
    (last,) = llm.stream("ab", SamplingParams(**FREE, logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY))
    assert (last.token_ids, last.text, last.finished) == (whole.token_ids, whole.text, True)
    # Calls that return at the end return all, as in vLLM.
    delta = llm.generate("ab", SamplingParams(**FREE, output_kind=RequestOutputKind.DELTA))[0]
    assert delta.token_ids == whole.token_ids


def test_deltas_of_several_samples(llm: LLM) -> None:
    params = SamplingParams(temperature=1, seed=3, n=3, max_tokens=6, ignore_eos=True)
    want = llm.generate("ab", params)[0]
    params.output_kind = RequestOutputKind.DELTA
    found: dict[int, list[int]] = {}
    for state in llm.stream("ab", params):
        for output in state.outputs:
            found.setdefault(output.index, []).extend(output.token_ids)
    assert found == {output.index: output.token_ids for output in want.outputs}


def test_metrics_and_cached_tokens(llm: LLM) -> None:
    prompt = [7 + token % 50 for token in range(40)]
    began, clock = time.time(), time.monotonic()
    cold, warm = (llm.generate(prompt, SamplingParams(**FREE))[0] for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 32)
    times = cold.metrics
    assert times is not None
    assert began <= times.arrival_time <= time.time()
    assert clock <= times.queued_ts <= times.scheduled_ts <= times.first_token_ts < times.last_token_ts
    assert times.num_generation_tokens == 12
    assert times.first_token_latency == times.first_token_ts - times.queued_ts
    assert cold.outputs[0].finished()


def test_prompt_logprobs_do_without_cached_tokens(llm: LLM) -> None:
    """As in vLLM: cached tokens yield no logits. Chunks of prompts are scored like whole ones elsewhere."""
    prompt = [7 + token % 50 for token in range(40)]
    llm.generate(prompt, SamplingParams(**FREE))
    scored = llm.generate(prompt, SamplingParams(**FREE, prompt_logprobs=2))[0]
    assert scored.num_cached_tokens == 0
    assert scored.prompt_logprobs is not None
    assert [entries is None for entries in scored.prompt_logprobs] == [True] + [False] * 39
    assert all(token in entries for token, entries in zip(prompt, scored.prompt_logprobs, strict=True) if entries)
