"""Structured outputs over several ranks: tokens and accepted drafts are those of one rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from specdec import LLM, SamplingParams, StructuredOutputsParams
from specdec.building.engine_builder import EngineBuilder
from specdec.models.sharded_llama import ShardedLlama
from tests.fakes import save_random_block
from tests.profiles import by_day
from tests.specdec.parallel.thread_ranks import thread_ranks
from tests.specdec.structured.checkpoints import SHAPE, VOCAB, Bytes

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
}
FORMS: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"regex": "[a-c]{2,4}-(x|yz)[0-9]"},
    {"choice": ["yes", "no", "maybe so"]},
]


def structured(seed: int = 9, form: dict[str, Any] = FORMS[1], **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 60, **more}, seed=seed, structured_outputs=StructuredOutputsParams(**form))


# Each form greedy and sampled, as several samples, and beside requests without one.
PARAMS = [
    *(structured(form=form, temperature=t) for form in FORMS for t in (0.0, 1.0)),
    structured(3, {"regex": "[a-e]{9}"}, n=2),
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
    SamplingParams(seed=5, max_tokens=9, ignore_eos=True),
]
# Logits of these, and of requests beside them, are gathered.
EDITED = [structured(4, {"regex": "[f-j]+k"}, max_tokens=30, top_p=0.9), structured(presence_penalty=0.5), PARAMS[0]]
Outcome = tuple[list[list[int]], dict[int, int]]


@contextmanager
def engine(folders: Bytes, draft: Path | str | None, **settings: Any) -> Iterator[LLM]:
    given: dict[str, Any] = {"dtype": "float64", "shape": SHAPE, "adaptive_drafts": False, "prefill_stretch": 0}
    with thread_ranks():
        llm = LLM(folders.target, draft, max_model_len=128, block_size=8, **{**given, **settings})
    with llm:
        yield llm


def outcome(llm: LLM) -> Outcome:
    """Return the tokens, and how many draft trees had how many of theirs accepted."""
    return texts(llm, PARAMS) + texts(llm, EDITED), llm.stats().trees_by_accepted


def texts(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    outputs = llm.generate([[5, 6, 7 + i] for i in range(len(params))], params, use_tqdm=False)
    assert not any(one.error for output in outputs for one in output.outputs)
    return [list(one.token_ids) for output in outputs for one in output.outputs]


@pytest.fixture(scope="module")
def dspark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dspark")
    save_random_block(folder, "dspark", vocab_size=VOCAB, head_dim=16, max_position_embeddings=1024)
    return folder


@pytest.fixture(scope="module")
def plain(bytes_model: Bytes) -> list[list[int]]:
    with engine(bytes_model, None) as llm:
        return outcome(llm)[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("draft", "settings"),
    by_day(
        [
            ("head", {"verify": "rejection"}),
            ("head3", {"pipeline_parallel_size": 2}),
            ("dspark", {}),
            ("head3", {"draft_tensor_parallel_size": 2}),
            ("head3", {}),
            ("head", {}),
            ("ngram", {}),
            ("none", {}),
        ],
        4,
    ),
)
def test_tokens_and_accepted_drafts_are_those_of_one_rank(
    bytes_model: Bytes, dspark: Path, plain: list[list[int]], draft: str, settings: dict[str, Any]
) -> None:
    """Forced text is drafted with every source, and with none."""
    folders = {"none": None, "head": bytes_model.head, "head3": bytes_model.head3, "dspark": dspark, "ngram": "ngram"}
    rule = {name: value for name, value in settings.items() if name == "verify"}
    with engine(bytes_model, folders[draft], **rule) as one:
        expected = outcome(one)
    with engine(bytes_model, folders[draft], tensor_parallel_size=2, **settings) as llm:
        assert isinstance(llm.model, ShardedLlama)
        found = outcome(llm)
    assert found == expected
    assert rule or found[0] == plain
    assert any(accepted and trees for accepted, trees in found[1].items())


@pytest.mark.long
def test_each_rank_forbids_tokens_of_its_own_part(
    bytes_model: Bytes, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No logits are gathered where only grammars edit them."""
    with engine(bytes_model, bytes_model.head3, tensor_parallel_size=2) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(ShardedLlama, "whole", None)
            assert texts(llm, PARAMS) == plain[: -len(EDITED)]
        assert texts(llm, EDITED) == plain[-len(EDITED) :]


@pytest.mark.long
def test_a_preempted_request_goes_on_in_its_grammar(bytes_model: Bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state is made anew on the other ranks, behind what it has said."""
    params = [structured(seed, {"regex": "[a-e]{30,32}"}) for seed in range(6)]
    with engine(bytes_model, None) as one:
        expected = texts(one, params)
    monkeypatch.setattr(EngineBuilder, "_num_blocks", lambda _: 17)
    with engine(bytes_model, bytes_model.head3, tensor_parallel_size=2, enable_prefix_caching=False) as llm:
        assert texts(llm, params) == expected
        assert llm.stats().preemptions > 0


@pytest.mark.long
def test_a_grammar_that_cannot_be_followed_hurts_no_other_request(bytes_model: Bytes, plain: list[list[int]]) -> None:
    wrong = structured(form={"regex": "(a"})
    impossible = structured(form={"choice": ["ab"]}, allowed_token_ids=[9])
    with engine(bytes_model, bytes_model.head3, tensor_parallel_size=2) as llm:
        stream = llm.stream([[5, 6, 7]], PARAMS[0])
        next(iter(stream))
        with pytest.raises(ValueError, match=r"structured_outputs.regex cannot be followed: [^\n]*; correct it$"):
            llm.generate([[5, 6]], wrong, use_tqdm=False)
        outputs = llm.generate([[5, 6, 7]] * 2, [impossible, PARAMS[0]], use_tqdm=False)
        assert [output.outputs[0].finish_reason for output in outputs] == ["error", "stop"]
        assert outputs[1].token_ids == plain[0]
        assert list(stream)[-1].token_ids == plain[0]


@pytest.mark.long
@pytest.mark.parametrize(
    "ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tensor", "stages"]
)
def test_thinking_and_the_form_behind_it_are_those_of_one_rank(thinking_model: Bytes, ranks: dict[str, Any]) -> None:
    params = [
        structured(seed, form, temperature=temperature, thinking_token_budget=seed)
        for seed, (form, temperature) in enumerate((form, temperature) for form in FORMS for temperature in (0.0, 1.0))
    ]
    found = []
    for settings in ({}, ranks):
        with engine(thinking_model, thinking_model.head3, reasoning_parser="qwen3", **settings) as llm:
            found.append((texts(llm, params), llm.stats().trees_by_accepted))
    assert found[0] == found[1]
    # The end mark comes behind at most as many tokens, and a start mark.
    marks = [row.index(269) for row in found[0][0]]
    assert all(place <= budget + 1 for budget, place in enumerate(marks))
    assert len(set(marks)) > 3
