"""Thinking through the engine: its limit, and the form behind it; equal with drafts and without, under every rule."""

import re
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import LLM, SamplingParams, StructuredOutputsParams
from specdec.core.call_forms import HERMES
from specdec.core.call_grammar import forced_calls
from specdec.core.reasoning import ReasoningParser
from specdec.core.tool_choice import Function, ToolChoice
from specdec.draft_heads.drafting.draft_shape import DraftShape
from tests.profiles import by_day, num_cases
from tests.simulated_gpu import simulated_gpu
from tests.specdec.structured.checkpoints import EOS, MARKS, Bytes, load
from tests.strategies import seeds
from tests.verify.chi_square import chi_square_tail

pytestmark = pytest.mark.slow

START, END, CALL = 268, 269, 270
PROMPT = [5, 6, 7]
# Of the model's last turn: without a mark, with the start mark, and with both.
PROMPTS = {"missing": PROMPT, "open": [*PROMPT, START], "ended": [*PROMPT, START, 9, END, 9]}
CALLS = forced_calls(
    ToolChoice("required"), [Function("f", {"type": "object", "properties": {}})], HERMES, {}, is_single=True
)
FORMS: dict[str, tuple[StructuredOutputsParams | None, str]] = {
    "none": (None, "(?s).*"),
    "regex": (StructuredOutputsParams(regex="[a-c]{2,4}-(x|yz)[0-9]"), "[a-c]{2,4}-(x|yz)[0-9]"),
    "json": (StructuredOutputsParams(json={"enum": ["name", 12, "largest"]}), '"name"|12|"largest"'),
    "calls": (CALLS, r'<tool_call>\n\{"name": "f", "arguments": \{\}\}\n</tool_call>'),
}


@pytest.fixture(scope="module")
def engines(thinking_model: Bytes) -> dict[str, LLM]:
    """Engines by what drafts and the rule."""
    folders = thinking_model

    def made(draft: Any, verify: str = "coupled") -> LLM:
        return load(folders, draft, verify, reasoning_parser="qwen3")

    found = {
        "none": made(None),
        "eagle": made(folders.head),
        "eagle3": made(folders.head3),
        "chains": made(f"{folders.head},ngram"),
        "rejection": made(folders.head, "rejection"),
    }
    backend = found["none"].request_maker.texts.need_tokenizer().backend
    assert [backend.token_to_id(mark) for mark in MARKS] == [START, END, CALL]
    return found


@pytest.mark.long
@settings(max_examples=num_cases(15))
@given(
    prompt=st.sampled_from(sorted(PROMPTS)),
    form=st.sampled_from(sorted(FORMS)),
    bias=st.sampled_from([0.0, 3.0, 5.0]),
    budget=st.none() | st.integers(0, 9),
    given_end=st.sampled_from([None, None, False, True]),
    penalty=st.sampled_from([0.0, 0.4]),
    temperature=st.sampled_from([0.0, 1.0]),
    top_k=st.sampled_from([0, 40]),
    seed=seeds,
)
def test_drafts_change_no_token_wherever_the_mark_falls(
    engines: dict[str, LLM],
    prompt: str,
    form: str,
    bias: float,
    budget: int | None,
    given_end: bool | None,
    penalty: float,
    temperature: float,
    top_k: int,
    seed: int,
) -> None:
    structure, pattern = FORMS[form]
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        max_tokens=48,
        presence_penalty=penalty,
        structured_outputs=structure,
        thinking_token_budget=budget,
        reasoning_ended=given_end,
        # Within an answer without a form, too.
        logit_bias={END: bias, START: bias / 2, EOS: -2.0},
    )
    found = {name: llm.generate([PROMPTS[prompt]], params, use_tqdm=False)[0] for name, llm in engines.items()}
    for name, output in found.items():
        if name != "rejection" or temperature == 0:
            assert output.token_ids == found["none"].token_ids, name
        tokens, one = output.token_ids, output.outputs[0]
        thinks = prompt != "ended" if given_end is None else not given_end
        size = 0
        if thinks:
            ends = {END} if structure is not None else {END, CALL}
            size = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
            if budget is not None:
                assert size - (tokens[0] == START) <= budget
            size += 1
        if one.finish_reason == "stop" and size <= len(tokens):
            tokenizer = engines["none"].request_maker.texts.need_tokenizer()
            answer = tokenizer.backend.decode(tokens[size:], skip_special_tokens=True)
            assert re.fullmatch(pattern, answer), answer


@pytest.mark.long
def test_drafts_reach_across_the_mark(engines: dict[str, LLM]) -> None:
    """What the limit forces, the mark, is drafted together with what the form forces behind it."""
    form = StructuredOutputsParams(choice=["(((("])
    params = SamplingParams(temperature=0, max_tokens=40, thinking_token_budget=4, structured_outputs=form)
    (output,) = engines["chains"].generate([PROMPTS["open"]], params, use_tqdm=False)
    one = output.outputs[0]
    assert one.token_ids[4] == END
    assert output.text.endswith("</think>((((")
    accepted = one.accepted[4:]
    assert accepted.count(True) >= len(accepted) - 1


@pytest.mark.long
def test_preempted_requests_and_samples_keep_their_states(thinking_model: Bytes, engines: dict[str, LLM]) -> None:
    form = StructuredOutputsParams(regex="[a-e]{9,12}")
    params = [
        SamplingParams(
            n=3,
            seed=seed,
            max_tokens=40,
            structured_outputs=form,
            thinking_token_budget=7 + seed,
            logit_bias={EOS: -100.0},
        )
        for seed in range(3)
    ]
    expected = engines["none"].generate([PROMPT] * 3, params, use_tqdm=False)
    small = {"kv_cache_memory": 8 * 16 * (3 * 4 * 16 + 32) * 8, "max_num_seqs": 8}
    llm = LLM(
        thinking_model.target,
        thinking_model.head,
        dtype="float64",
        shape=DraftShape(3, 2, 6),
        adaptive_drafts=False,
        prefill_stretch=0,
        reasoning_parser="deepseek_r1",
        **small,  # type: ignore[arg-type]
    )
    found = llm.generate([PROMPT] * 3, params, use_tqdm=False)
    assert [[one.token_ids for one in output.outputs] for output in found] == [
        [one.token_ids for one in output.outputs] for output in expected
    ]
    assert llm.stats().preemptions > 0
    assert all(re.fullmatch("[a-e]{9,12}", one.text.split("</think>")[1]) for each in found for one in each.outputs)


TEXTS = ["ab", "b"]
BIAS = {END: -4.0, EOS: -3.0}


@pytest.mark.long
@pytest.mark.parametrize("verify", by_day(["rejection", "coupled"], 1))
def test_the_distribution_is_that_of_the_masked_target(
    thinking_model: Bytes, engines: dict[str, LLM], verify: str
) -> None:
    """Of all ways to think at most two of three tokens, and then to answer one of two texts."""
    llm = engines["rejection" if verify == "rejection" else "eagle"]
    tokenizer = llm.request_maker.texts.need_tokenizer()
    a, b = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "ab")
    count = num_cases(400)
    params = SamplingParams(
        n=count,
        seed=3,
        max_tokens=8,
        allowed_token_ids=[a, b, END, EOS],
        logit_bias=BIAS,
        thinking_token_budget=2,
        structured_outputs=StructuredOutputsParams(choice=TEXTS),
    )
    (output,) = llm.generate([PROMPTS["open"]], params, use_tqdm=False)
    ways = Counter(tuple(one.token_ids) for one in output.outputs)

    def follow(way: tuple[int, ...]) -> list[int]:
        """Tokens that may come next; an end token ends the output while it thinks, too."""
        if END not in way:
            return [a, b, END, EOS] if len(way) < 2 else [END]
        answer = way[way.index(END) + 1 :]
        return sorted({(*text, EOS)[len(answer)] for text in ([a, b], [b]) if tuple(text[: len(answer)]) == answer})

    chances = dict[tuple[int, ...], float]()

    def walk(way: tuple[int, ...], chance: float) -> None:
        if way[-1:] == (EOS,):
            chances[way] = chance
            return
        allowed = follow(way)
        with torch.inference_mode():
            logits = thinking_model.model(torch.tensor([[*PROMPTS["open"], *way]])).logits[0, -1].double()
            for token, bias in BIAS.items():
                logits[token] += bias
        for token, share in zip(allowed, torch.softmax(logits[allowed], -1).tolist(), strict=True):
            walk((*way, token), chance * share)

    walk((), 1.0)
    assert set(ways) <= set(chances)
    found = torch.tensor([ways[way] for way in chances], dtype=torch.float64)
    expected = count * torch.tensor(list(chances.values()), dtype=torch.float64)
    assert int((expected >= 5).sum()) > 5
    assert chi_square_tail(found, expected) > 1e-3


@pytest.mark.long
def test_on_a_simulated_gpu(thinking_model: Bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    form = StructuredOutputsParams(regex="[a-d](x{5}|y)")
    params = [
        SamplingParams(temperature=1.0, seed=4, max_tokens=20, thinking_token_budget=5, structured_outputs=form),
        SamplingParams(temperature=1.0, seed=4, max_tokens=9, thinking_token_budget=3),
        SamplingParams(temperature=1.0, seed=4, max_tokens=9),
    ]
    given: dict[str, Any] = {"shape": DraftShape(2, 2, 4), "adaptive_drafts": False, "reasoning_parser": "qwen3"}
    given |= {"prefill_stretch": 0, "max_model_len": 32, "max_num_seqs": 3, "block_size": 8, "dtype": "float32"}
    given |= {"kv_cache_memory": 1 << 18, "enforce_eager": True}

    def tokens(llm: LLM) -> list[list[int]]:
        return [one.token_ids for one in llm.generate([PROMPT] * 3, params, use_tqdm=False)]

    expected = tokens(LLM(thinking_model.target, thinking_model.head, **given))
    assert END in expected[0]
    assert expected[1] != expected[2]
    with simulated_gpu(monkeypatch):
        assert tokens(LLM(thinking_model.target, thinking_model.head, device="cuda", **given)) == expected


class Brackets(ReasoningParser):
    """A parser of one's own, whose marks are letters of the tokenizer."""

    START, END = "[", "]"


def test_a_parser_of_ones_own_is_named_by_its_class(thinking_model: Bytes) -> None:
    llm = load(thinking_model, None, reasoning_parser=f"{__name__}:Brackets")
    tokenizer = llm.request_maker.texts.need_tokenizer()
    params = SamplingParams(temperature=0, thinking_token_budget=0, max_tokens=3)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    assert output.token_ids[:2] == tokenizer.encode("[]", add_special_tokens=False)


def test_what_does_not_fit_is_refused_in_one_line(bytes_model: Bytes, thinking_model: Bytes) -> None:
    refused = {
        "qwen4": "reasoning_parser is 'qwen4'; it must be deepseek_r1, qwen3, or MODULE:CLASS",
        "no_such_module:X": "reasoning_parser 'no_such_module:X' cannot be imported: No module named",
        "json:dumps": "'json:dumps' is <function dumps",
    }
    for name, message in refused.items():
        with pytest.raises(ValueError, match=message) as caught:
            load(thinking_model, None, reasoning_parser=name)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="'<think>' is not a token of the model"):
        load(bytes_model, None, reasoning_parser="qwen3")
    llm = load(bytes_model, None)
    for params in (SamplingParams(thinking_token_budget=3), SamplingParams(reasoning_ended=True)):
        with pytest.raises(ValueError, match="it needs the engine's reasoning_parser: leave it out"):
            llm.generate([PROMPT], params)
    with pytest.raises(ValueError, match="thinking_token_budget is -2; it must be 0 or more, or -1 for any number"):
        SamplingParams(thinking_token_budget=-2)
