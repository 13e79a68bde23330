"""Structured outputs through the engine: forms, ends of outputs, drafts for free, preemption, distribution, a GPU."""

import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from specdec import LLM, SamplingParams, StructuredOutputsParams
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.tree_drafter import TreeDrafter
from specdec.verify import grammar_state
from tests.profiles import by_day, num_cases
from tests.simulated_gpu import simulated_gpu
from tests.specdec.structured.checkpoints import EOS, VOCAB, Bytes, load
from tests.verify.chi_square import chi_square_tail

pytestmark = pytest.mark.slow

PROMPT = [5, 6, 7]
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "choice": ({"choice": ["yes", 'no "never"', "größer\n\\", "\x07"]}, '(?s)yes|no "never"|größer\n\\\\|\x07'),
    "regex": ({"regex": "[a-c]{2,4}-(x|yz)[0-9]"}, "[a-c]{2,4}-(x|yz)[0-9]"),
    "gbnf": ({"grammar": 'root ::= "(" root ")" | [xy]'}, r"\(*[xy]\)*"),
    "lark": ({"grammar": 'start: "a" word\nword: /[b-d]{1,3}/'}, "a[b-d]{1,3}"),
    "blanks": (
        {"json": {"type": "array", "items": {"type": "null"}, "maxItems": 1}, "disable_any_whitespace": False},
        r"\[\s*(null\s*)?\]",
    ),
}


def structured(**given: Any) -> SamplingParams:
    """Parameters with a form, and others that are no fields of `StructuredOutputsParams`."""
    names = StructuredOutputsParams.__dataclass_fields__
    form = StructuredOutputsParams(**{name: value for name, value in given.items() if name in names})
    others = {name: value for name, value in given.items() if name not in names}
    return SamplingParams(**{"temperature": 1.0, "seed": 3, "max_tokens": 60, "structured_outputs": form, **others})


@pytest.fixture(scope="module")
def plain(bytes_model: Bytes) -> LLM:
    return load(bytes_model, None)


@pytest.fixture(scope="module")
def drafting(bytes_model: Bytes) -> LLM:
    return load(bytes_model, bytes_model.head3)


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_followed(plain: LLM, drafting: LLM, name: str) -> None:
    form, pattern = FORMS[name]
    # Blanks without end are valid too, so a penalty ends them.
    params = [structured(seed=seed, frequency_penalty=1.0, max_tokens=200, **form) for seed in range(8)]
    expected, found = (llm.generate([PROMPT] * 8, params, use_tqdm=False) for llm in (plain, drafting))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    for one in found:
        assert one.outputs[0].finish_reason == "stop"
        assert re.fullmatch(pattern, one.text), one.text
    assert len({one.text for one in found}) > 1


def test_no_mask_is_made_while_a_tree_is_searched(drafting: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep the head's levels apart, which a call or a graph drafts at once."""
    searching, asked = [False], Counter[bool]()
    propose, masks = TreeDrafter.propose, grammar_state.GrammarState.masks

    def watched(*given: Any) -> Any:
        searching[0] = True
        try:
            return propose(*given)
        finally:
            searching[0] = False

    def counted(*given: Any) -> Any:
        asked[searching[0]] += 1
        return masks(*given)

    monkeypatch.setattr(TreeDrafter, "propose", watched)
    monkeypatch.setattr(grammar_state.GrammarState, "masks", counted)
    output = drafting.generate([PROMPT], structured(regex="[a-e]{30}"), use_tqdm=False)[0]
    assert len(output.text) == 30
    assert set(asked) == {False}


def test_a_json_object_is_one(plain: LLM) -> None:
    """Its first key would be of any length, so the text ends before it."""
    output = plain.generate([PROMPT], structured(json_object=True, stop=['"']), use_tqdm=False)[0]
    assert output.text in ("{", "{}")


def test_special_tokens_are_no_text(plain: LLM) -> None:
    """Their names could be spelled in a string, but they are left out of the text."""
    params = structured(regex="[^a]{1,30}", logit_bias={0: 100.0, 1: 100.0}, max_tokens=20)
    assert not {0, 1} & set(plain.generate([PROMPT], params, use_tqdm=False)[0].token_ids)


def test_columns_that_are_no_tokens_are_never_taken(plain: LLM) -> None:
    bias = dict.fromkeys(range(VOCAB - 6, VOCAB), 100.0)
    output = plain.generate([PROMPT], structured(regex="[^a]{4}", logit_bias=bias), use_tqdm=False)[0]
    assert max(output.token_ids) < VOCAB - 6


def test_forced_text_costs_no_steps_of_its_own(bytes_model: Bytes) -> None:
    """Jump-forward: a schema of long keys takes a step per chain of forced tokens, and plain decoding one each."""
    llm = load(bytes_model, "ngram", shape=DraftShape(16, 1, 16))
    keys = ["identification_number", "date_of_registration", "responsible_department"]
    schema = {"type": "object", "properties": {key: {"type": "boolean"} for key in keys}, "required": keys}
    (output,) = llm.generate([PROMPT], structured(json=schema, temperature=0, max_tokens=400), use_tqdm=False)
    one = output.outputs[0]
    assert one.finish_reason == "stop"
    tokens = len(one.token_ids)
    assert tokens > 80
    assert one.stats.steps <= tokens / 4
    # With a tokenizer of single tokens for what is forced, nothing of it is a guess.
    (choice,) = llm.generate([PROMPT], structured(choice=["(((((((((((((((("]), use_tqdm=False)
    assert len(choice.token_ids) == 17
    assert choice.outputs[0].stats.steps == 1
    assert choice.outputs[0].accepted.count(True) == 16


def test_an_output_that_is_complete_ends(plain: LLM, drafting: LLM) -> None:
    """By an end token, or without one where that is impossible; behind the end there are end tokens alone."""
    cases: list[tuple[dict[str, Any], list[int], str]] = [
        ({}, [EOS], "stop"),
        ({"min_tokens": 9}, [], "stop"),
        ({"ignore_eos": True, "max_tokens": 6}, [EOS] * 4, "length"),
        ({"stop_token_ids": [0]}, [EOS], "stop"),
    ]
    for llm in (plain, drafting):
        text = llm.request_maker.texts.need_tokenizer().encode("ab", add_special_tokens=False)
        for given, rest, reason in cases:
            bias = {0: -100.0} if "stop_token_ids" in given else None
            params = structured(choice=["ab"], temperature=0, logit_bias=bias, **given)
            (output,) = llm.generate([PROMPT], params, use_tqdm=False)
            assert (output.token_ids, output.outputs[0].finish_reason) == ([*text, *rest], reason), given
            assert output.text == "ab"


def test_a_form_that_no_token_can_follow_fails_alone(plain: LLM) -> None:
    wrong = structured(choice=["ab"], allowed_token_ids=[9])
    outputs = plain.generate([PROMPT] * 2, [wrong, structured(choice=["ab"])], use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "stop"]
    assert "structured_outputs" in (outputs[0].outputs[0].error or "")


def test_a_form_that_becomes_too_complex_fails_alone(
    plain: LLM, drafting: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts at the same token as without; what they reach only may be too complex."""
    monkeypatch.setattr(grammar_state, "_MOST_ITEMS", 500)
    complex_form = 'start: "(" a | "xyz"\na: a a | /[a-z ]/ | a a a'
    other = structured(regex="[a-e]{30}")
    params = [structured(grammar=complex_form, seed=seed, max_tokens=80, logit_bias={EOS: -9.0}) for seed in range(4)]
    found = [llm.generate([PROMPT] * 5, [*params, other], use_tqdm=False) for llm in (plain, drafting)]
    for outputs in found:
        (*failed, whole), (*expected, alone) = ([each.outputs[0] for each in one] for one in (outputs, found[0]))
        assert (whole.finish_reason, whole.token_ids) == ("stop", alone.token_ids)
        assert [one.token_ids for one in failed] == [one.token_ids for one in expected]
        assert {one.finish_reason for one in failed} == {"error", "stop"}
        for one in failed:
            message = "^structured_outputs has become too complex: [^\n]*Too many items[^\n]*; make it simpler$"
            assert one.text == "xyz" if one.finish_reason == "stop" else re.search(message, one.error or "")


@pytest.mark.long
def test_samples_have_a_state_each_and_preempted_requests_keep_theirs(bytes_model: Bytes, plain: LLM) -> None:
    params = [structured(regex="[a-e]{18,20}", n=3, seed=seed, logprobs=1) for seed in range(3)]
    expected = plain.generate([PROMPT] * 3, params, use_tqdm=False)
    small = {"kv_cache_memory": 8 * 16 * (3 * 4 * 16 + 32) * 8, "max_num_seqs": 8}
    llm = LLM(
        bytes_model.target,
        bytes_model.head,
        dtype="float64",
        shape=DraftShape(3, 2, 6),
        adaptive_drafts=False,
        prefill_stretch=0,
        **small,  # type: ignore[arg-type]
    )
    found = llm.generate([PROMPT] * 3, params, use_tqdm=False)
    assert [[one.token_ids for one in output.outputs] for output in found] == [
        [one.token_ids for one in output.outputs] for output in expected
    ]
    assert llm.stats().preemptions > 0
    assert len({one.text for output in expected for one in output.outputs}) == 9


@pytest.mark.long
@pytest.mark.parametrize("verify", by_day(["rejection", "coupled"], 1))
def test_the_distribution_is_that_of_the_masked_target(bytes_model: Bytes, verify: str) -> None:
    """Of four texts that share beginnings. Forced ends come as chains, the rest from drawn trees."""
    texts = ["ab!!!!", "ac", "bb", "b"]
    llm = load(bytes_model, bytes_model.head, verify)
    tokenizer = llm.request_maker.texts.need_tokenizer()
    count = num_cases(250)
    (output,) = llm.generate([PROMPT], structured(choice=texts, n=count), use_tqdm=False)
    ways = Counter(tuple(one.token_ids) for one in output.outputs)
    spelled = [(*tokenizer.encode(text, add_special_tokens=False), EOS) for text in texts]
    assert set(ways) <= set(spelled)
    chances = torch.tensor([_chance(bytes_model, way, spelled) for way in spelled], dtype=torch.float64)
    assert chances.sum().item() == pytest.approx(1)
    found = torch.tensor([ways[way] for way in spelled], dtype=torch.float64)
    assert chi_square_tail(found, count * chances) > 1e-3


def _chance(folders: Bytes, way: tuple[int, ...], ways: list[tuple[int, ...]]) -> float:
    """Return the target's probability of an output where the tokens of no other output are possible."""
    chance = 1.0
    for place, token in enumerate(way):
        allowed = {other[place] for other in ways if other[:place] == way[:place] and len(other) > place}
        with torch.inference_mode():
            logits = folders.model(torch.tensor([[*PROMPT, *way[:place]]])).logits[0, -1].double()
        chances = torch.softmax(logits[sorted(allowed)], -1)
        chance *= float(chances[sorted(allowed).index(token)])
    return chance


@pytest.mark.long
@pytest.mark.parametrize("verify", by_day(["rejection", "coupled"], 1))
def test_on_a_simulated_gpu_only_steps_with_a_grammar_wait_more_than_once(
    bytes_model: Bytes, monkeypatch: pytest.MonkeyPatch, verify: str
) -> None:
    params = [structured(regex="[a-d](x{5}|y)"), SamplingParams(temperature=1.0, seed=4, max_tokens=9)]
    settings: dict[str, Any] = {"shape": DraftShape(2, 2, 4), "verify": verify, "adaptive_drafts": False}
    settings |= {"prefill_stretch": 0, "max_model_len": 32, "max_num_seqs": 2, "block_size": 8, "dtype": "float32"}
    settings |= {"kv_cache_memory": 1 << 18, "enforce_eager": True}

    def tokens(llm: LLM) -> list[list[int]]:
        return [one.token_ids for one in llm.generate([PROMPT, [9, 8]], params, use_tqdm=False)]

    expected = tokens(LLM(bytes_model.target, bytes_model.head, **settings))
    with simulated_gpu(monkeypatch) as gpu:
        llm = LLM(bytes_model.target, bytes_model.head, device="cuda", **settings)
        step, steps = llm.engine.step, list[tuple[bool, int]]()

        def watched() -> Any:
            is_structured = any(request.sampling.grammar for request in llm.engine.scheduler.running)
            before = len(gpu.waits)
            found = step()
            steps.append((is_structured, len(gpu.waits) - before))
            return found

        monkeypatch.setattr(llm.engine, "step", watched)
        assert tokens(llm) == expected
        waits = [count for is_structured, count in steps if not is_structured]
        assert len(waits) > 2
        # The first step admits the requests.
        assert all(count <= 1 for count in waits[1:])
        assert any(count > 1 for is_structured, count in steps if is_structured)


@pytest.mark.parametrize("num_more", [2, 40])
def test_a_tokenizer_with_more_tokens_than_logits(bytes_model: Bytes, tmp_path: Path, num_more: int) -> None:
    """Such as Llama 2 with a padding token of its own. The model can neither read the others nor generate them."""
    target = tmp_path / "target"
    shutil.copytree(bytes_model.target, target)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    padding = VOCAB - len(tokenizer) + num_more - 2
    tokenizer.add_tokens([*(f"<pad{index}>" for index in range(padding)), "<more>"])
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(target)
    assert len(tokenizer) == VOCAB + num_more
    llm = load(bytes_model._replace(target=target), bytes_model.head3)
    # Its tokens by the tokenizer are '{"' and one beyond the logits.
    text = '{"<more>'
    unused = {"bad_words": ["<more>", "[PAD]"], "stop": ["[PAD]"], "min_tokens": 2}
    output = llm.generate([PROMPT], structured(choice=[text], **unused), use_tqdm=False)[0]
    assert output.text == text
    assert max(output.token_ids) < VOCAB
    with pytest.raises(ValueError, match=rf"^prompt token {len(tokenizer) - 1} is outside the vocabulary"):
        llm.generate(["a[PAD]"], SamplingParams(max_tokens=2), use_tqdm=False)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, "structured_outputs has none of json, regex, choice, grammar, json_object; give exactly one"),
    "two": ({"regex": "a", "choice": ["a"]}, "structured_outputs has regex and choice of"),
    "no object": ({"json_object": False}, "structured_outputs has none of"),
    "empty choice": ({"choice": []}, r"structured_outputs.choice is \[\]; it must be a list of at least one text"),
    "text as choice": ({"choice": "ab"}, "structured_outputs.choice is 'ab'"),
    "empty text": ({"choice": [""]}, "holds an empty text"),
    "number": ({"regex": 3}, "structured_outputs.regex is 3; it must be text"),
    "schema as a list": ({"json": "[1]"}, r"structured_outputs.json is \[1\]; it must be a JSON schema"),
    "no JSON": ({"json": "{"}, "structured_outputs.json is not valid JSON"),
    "no JSON value": ({"json": {"enum": [{1, 2}]}}, "holds a value that JSON does not have"),
    "unique": (
        {"json": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}},
        "at '/properties/a', 'uniqueItems' is not supported; leave it out",
    ),
    "not": ({"json": {"anyOf": [{"type": "null"}, {"not": {}}]}}, "at '/anyOf/1', 'not' is not supported"),
    "format": ({"json": {"type": "string", "format": "idn-email"}}, "format is 'idn-email'; supported are email"),
    "unevaluated": (
        {"json": {"anyOf": [{"type": "object"}], "unevaluatedProperties": False}},
        "'unevaluatedProperties' beside other schemas is not supported; leave it out",
    ),
    "multiple": ({"json": {"type": "number", "multipleOf": 1e-12}}, "multipleOf is 1E-12; it may have at most"),
    "reference": ({"json": {"$ref": "http://a/b"}}, "only references within the schema"),
    "type": ({"json": {"type": "strng"}}, "structured_outputs.json: at '/', type is 'strng'; it must be a JSON type"),
}
WRONG_GRAMMARS: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"regex": "(a"}, r"structured_outputs.regex cannot be followed: '\(a': unclosed group; correct it$"),
    "lookahead": ({"regex": "a(?=b)"}, "structured_outputs.regex cannot be followed: .*look-ahead .* is not supported"),
    "gbnf": ({"grammar": "root ::= x"}, "structured_outputs.grammar cannot be followed: Rule 'x' not found"),
    "lark": ({"grammar": "start: x"}, 'structured_outputs.grammar cannot be followed: unknown name: "x"'),
    "required": (
        {"json": {"required": ["b"], "properties": {"a": {}}, "additionalProperties": False}},
        "structured_outputs.json cannot be followed: .*required property 'b' is unsatisfiable",
    ),
    "bounds": (
        {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
        r"structured_outputs.json cannot be followed: .*minimum \(5\) is greater than maximum \(3\)",
    ),
    "missing": ({"json": {"$ref": "#/nope"}}, "at '/', \\$ref is '#/nope', which is not there; correct it"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_parameters_are_refused_in_one_line(name: str) -> None:
    given, message = WRONG[name]
    with pytest.raises(ValueError, match=message) as caught:
        StructuredOutputsParams(**given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", WRONG_GRAMMARS)
def test_invalid_grammars_are_refused_in_one_line(plain: LLM, name: str) -> None:
    given, message = WRONG_GRAMMARS[name]
    with pytest.raises(ValueError, match=message) as caught:
        plain.generate([PROMPT], structured(**given), use_tqdm=False)
    assert "\n" not in str(caught.value)


def test_a_model_without_tokenizer_cannot_follow_a_form(bytes_model: Bytes, tmp_path: Any) -> None:
    for file in bytes_model.target.iterdir():
        if not file.name.startswith("tokenizer"):
            (tmp_path / file.name).symlink_to(file)
    llm = LLM(tmp_path, draft=None, dtype="float64", kv_cache_memory=1 << 22, adaptive_drafts=False, prefill_stretch=0)
    with pytest.raises(ValueError, match="structured_outputs needs a tokenizer"):
        llm.generate([PROMPT], structured(choice=["a"]), use_tqdm=False)
    with pytest.raises(ValueError, match="structured_outputs is 'json'; it must be StructuredOutputsParams"):
        SamplingParams(structured_outputs="json")  # type: ignore[arg-type]
