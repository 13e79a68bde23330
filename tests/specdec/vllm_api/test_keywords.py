"""vLLM's keywords of `LLM`: taken, or refused in one line."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

from specdec import LLM, AsyncLLM, CheckpointError, DraftShape, SamplingParams
from specdec.building.resolved_config import resolved_config
from specdec.building.vllm_keywords import FOREIGN_ENGINE, VLLMKeywords, own_settings
from specdec.config import default_shape
from specdec.core.sampling_params import FOREIGN_SAMPLING
from specdec.engine.prompts import FOREIGN_PROMPT
from tests.specdec.tiny_checkpoints import Tiny

DOCS = Path(__file__).parents[3] / "docs"
FREE = SamplingParams(temperature=1, max_tokens=8, ignore_eos=True)
QUICK: dict[str, Any] = {"adaptive_drafts": False, "prefill_stretch": 0}


def test_the_table_of_keywords_is_whole() -> None:
    assert set(get_type_hints(VLLMKeywords)) == {*FOREIGN_ENGINE, "speculative_config", "kv_cache_memory_bytes"}


def test_every_keyword_is_in_the_documents() -> None:
    page = (DOCS / "vllm.md").read_text(encoding="utf-8")
    names = {*FOREIGN_ENGINE, *FOREIGN_SAMPLING, *FOREIGN_PROMPT, *get_type_hints(VLLMKeywords)}
    assert {name for name in names if f"`{name}" not in page} == set()


def test_a_call_of_vllms_builds_an_engine(tiny: Tiny) -> None:
    llm = LLM(
        model=str(tiny.target),
        tokenizer=str(tiny.target),
        tokenizer_mode="auto",
        skip_tokenizer_init=False,
        trust_remote_code=False,
        tensor_parallel_size=1,
        dtype=torch.float32,
        quantization=None,
        seed=0,
        gpu_memory_utilization=0.5,
        swap_space=0,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        disable_log_stats=True,
        max_logprobs=100,
        kv_cache_memory_bytes=1 << 22,
        speculative_config={"method": "eagle", "model": str(tiny.head), "num_speculative_tokens": 3},
        **QUICK,
    )
    config = llm.config
    assert (config.model, config.draft, config.dtype) == (tiny.target, tiny.head, "float32")
    assert config.shape == replace(default_shape("cpu"), depth=3)
    assert (config.max_model_len, config.scheduler.max_num_seqs, config.kv_cache_memory) == (64, 4, 1 << 22)
    assert len(llm.generate("ab", FREE)[0].token_ids) == 8


REFUSED = [
    ({"model": ""}, "'' is no checkpoint; give a folder, a GGUF file, or org/name on the hub"),
    ({"model": "", "tokenizer": ""}, "'' is no checkpoint; give a folder"),
    ({"data_parallel_size": 2}, "data_parallel_size is 2, which is not supported; an engine is one replica"),
    ({"data_parallel_size": True}, "data_parallel_size is True, which is not supported"),
    ({"max_model_length": 9}, "LLM has no 'max_model_length'; the nearest it has is 'max_model_len'"),
    ({"speculative_conf": {}}, "LLM has no 'speculative_conf'; the nearest it has is 'speculative_config'"),
    ({"speculative_config": []}, "speculative_config is []; it must be a JSON object"),
    ({"speculative_config": {"metod": "ngram"}}, "speculative_config has the unknown key 'metod'; known are method"),
    ({"speculative_config": {"method": "medusa", "model": "x"}}, "speculative_config has method 'medusa'; it must be"),
    ({"speculative_config": {"prompt_lookup_max": 0}}, "speculative_config has prompt_lookup_max 0; it must be"),
    ({"draft": "ngram", "speculative_config": {}}, "draft is 'ngram' and speculative_config is given; leave one out"),
    ({"kv_cache_memory": 1, "kv_cache_memory_bytes": 1}, "kv_cache_memory and kv_cache_memory_bytes are the same"),
    ({"dtype": torch.int8}, "dtype 'int8' is unknown; use auto, float64"),
    ({"seed": -3}, "seed is -3; it must be between 0 and 2^63 - 1"),
    ({"quantization": "awq"}, "quantization is 'awq'; it must be one of none, q8"),
    ({"scheduler": None, "chains": ("ngram",)}, 'unknown keyword chains; use draft="ngram"'),
]


@pytest.mark.parametrize(("keywords", "message"), REFUSED, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_unsupported_keywords_are_one_line(kind: Any, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as caught:
        kind(**keywords)
    assert "\n" not in str(caught.value)


def test_arguments_that_no_parameter_takes_are_one_line() -> None:
    with pytest.raises(ValueError, match=r"^LLM: too many positional arguments$"):
        LLM("a", "b", "c")  # type: ignore[call-arg]


@pytest.mark.parametrize("name", FOREIGN_ENGINE)
def test_values_that_ask_for_nothing_are_taken(name: str) -> None:
    facts = FOREIGN_ENGINE[name]
    for value in (None, *(facts.allowed if facts.allowed is not None else (3, "x"))):
        keywords: Any = {name: value}
        assert own_settings(None, None, keywords) == (None, {})
    if facts.allowed is not None:
        keywords = {name: "something else"}
        with pytest.raises(ValueError, match=f"^{name} is 'something else', which is not supported; \\w"):
            own_settings(None, None, keywords)


@pytest.mark.parametrize(("given", "wanted"), [("half", "float16"), ("float", "float32"), (torch.float64, "float64")])
def test_dtypes_by_vllms_names(given: Any, wanted: str) -> None:
    assert own_settings(None, None, {"dtype": given}) == (None, {"dtype": wanted})


def test_speculation_is_what_the_draft_would_be(tiny: Tiny) -> None:
    config: Any = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    draft, own = own_settings(tiny.target, None, {"speculative_config": config, "shape": DraftShape(2, 2, 7)})
    assert (draft, own) == ("ngram", {"shape": DraftShape(4, 2, 7)})
    assert resolved_config(tiny.target, draft, own) == resolved_config(tiny.target, "ngram", own)


def test_a_seed_makes_a_program_repeat_itself(tiny: Tiny) -> None:
    def tokens(seed: int | None) -> list[list[int]]:
        llm = LLM(tiny.target, dtype="float64", seed=seed, **QUICK)
        return [output.token_ids for _ in range(2) for output in llm.generate(["ab", "ab"], FREE)]

    one = tokens(7)
    assert one == tokens(7)
    assert len({tuple(each) for each in one}) == 4
    assert one != tokens(8)
    assert one != tokens(None)


def test_a_tokenizer_of_another_folder(tiny: Tiny, tmp_path: Path) -> None:
    llm = LLM(tiny.bare, tokenizer=tiny.target, dtype="float64", **QUICK)
    own = LLM(tiny.target, dtype="float64", **QUICK)
    assert llm.generate("ab", FREE)[0].prompt_token_ids == own.generate("ab", FREE)[0].prompt_token_ids
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json; give prompts as token ids, or add the tokenizer"):
        LLM(tiny.bare, tokenizer=tmp_path)


@pytest.mark.parametrize(("method", "is_told"), [("eagle", False), (None, False), ("eagle3", True), ("dspark", True)])
def test_a_method_that_is_not_the_heads_kind_is_told(
    tiny: Tiny, caplog: pytest.LogCaptureFixture, method: str | None, is_told: bool
) -> None:
    """The head drafts all the same, as what its files say that it is."""
    given = {"model": str(tiny.head)} if method is None else {"model": str(tiny.head), "method": method}
    draft, own = own_settings(tiny.target, None, {"speculative_config": given})
    with caplog.at_level("WARNING", "specdec"):
        assert resolved_config(tiny.target, draft, own).draft == tiny.head
    told = f"speculative_config has method {method!r}, and {tiny.head} is a draft of the kind eagle; it drafts as what"
    assert any(told in record.getMessage() for record in caplog.records) == is_told
