"""Fifty JSON schemas: valid output at temperature 0 and 1, and with drafts the tokens of plain decoding."""

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from specdec import LLM, CompletionOutput, SamplingParams, StructuredOutputsParams
from tests.profiles import IS_NIGHTLY
from tests.specdec.structured.checkpoints import Bytes, load

pytestmark = pytest.mark.slow

SCHEMAS: dict[str, Any] = json.loads((Path(__file__).parent / "schemas.json").read_text(encoding="utf-8"))


def run(llm: LLM, names: list[str]) -> list[CompletionOutput]:
    """Output of each schema at temperature 0, then of each at temperature 1."""
    params = [
        SamplingParams(
            temperature=temperature,
            seed=7,
            max_tokens=900,
            structured_outputs=StructuredOutputsParams(json=SCHEMAS[name]),
        )
        for temperature in (0.0, 1.0)
        for name in names
    ]
    return [each.outputs[0] for each in llm.generate([[5, 6, 7]] * len(params), params, use_tqdm=False)]


def check(outputs: list[CompletionOutput], names: list[str]) -> None:
    for name, output in zip(names * 2, outputs, strict=True):
        assert output.finish_reason == "stop", (name, output.error, output.text)
        Draft202012Validator(SCHEMAS[name]).validate(json.loads(output.text))


@pytest.fixture(scope="module")
def plain(bytes_model: Bytes) -> list[CompletionOutput]:
    return run(load(bytes_model, None), list(SCHEMAS))


@pytest.mark.long
def test_there_are_fifty_and_plain_decoding_follows_them(plain: list[CompletionOutput]) -> None:
    assert len(SCHEMAS) == 50
    assert all(not Draft202012Validator.check_schema(schema) for schema in SCHEMAS.values())
    check(plain, list(SCHEMAS))
    # Temperature 1 draws other values.
    assert sum(cold.text != warm.text for cold, warm in zip(plain[:50], plain[50:], strict=True)) > 40


@pytest.mark.long
@pytest.mark.parametrize(("draft", "every"), [("head", 1), ("ngram", 5)])
def test_drafts_change_no_token(bytes_model: Bytes, plain: list[CompletionOutput], draft: str, every: int) -> None:
    names = list(SCHEMAS)[:: 1 if IS_NIGHTLY else every]
    expected = [output for output, name in zip(plain, list(SCHEMAS) * 2, strict=True) if name in names]
    found = run(load(bytes_model, bytes_model.head if draft == "head" else draft), names)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    # Forced text is drafted without a draft source too.
    for outputs, most in ((expected, 0.6), (found, 0.5)):
        steps, tokens = sum(one.stats.steps for one in outputs), sum(len(one.token_ids) for one in outputs)
        assert steps < most * tokens
    check(found, names)


@pytest.mark.long
@pytest.mark.parametrize("draft", ["head", "head3", "ngram"])
def test_rejection_sampling_follows_them(bytes_model: Bytes, draft: str) -> None:
    names = list(SCHEMAS) if IS_NIGHTLY else list(SCHEMAS)[::7]
    check(run(load(bytes_model, getattr(bytes_model, draft, draft), "rejection"), names), names)
