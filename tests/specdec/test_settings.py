"""Settings are declared once: `LLM`'s keywords and the command line's options are the dataclasses' fields."""

import math
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

import numpy as np
import pytest
import typer

from specdec import DraftShape, SamplingParams
from specdec.building.llm_settings import LLMSettings, engine_config
from specdec.cli.app import app
from specdec.config import EngineConfig
from specdec.core.request_limits import RequestLimits
from specdec.core.sampling_params import BeamSearchParams
from specdec.kernels.types.settings import check_settings, kinds_of, setting, settings_of
from specdec.scheduling.scheduler_config import SchedulerConfig

OWNERS = [SamplingParams, BeamSearchParams, DraftShape, EngineConfig, SchedulerConfig, RequestLimits]
GENERATE: Any = typer.main.get_command(app).commands["generate"]  # type: ignore[attr-defined]
# No options: a command has no use for them, or an option of its own.
WITHOUT_OPTION = {
    "n": "one answer is shown",
    "choices": "their scores are no text",
    "logit_bias": "token ids",
    "allowed_token_ids": "token ids",
    "stop_token_ids": "token ids",
    "include_stop_str_in_output": "for clients",
    "skip_special_tokens": "for clients",
    "spaces_between_special_tokens": "for clients",
    "kept_special_tokens": "for clients",
    "detokenize": "text is shown",
    "truncate_prompt_tokens": "for clients",
    "output_kind": "for streams of the Python API",
    "logprobs": "not shown",
    "prompt_logprobs": "not shown",
    "logprobs_mode": "not shown",
    "structured_outputs": "for clients",
    "reasoning_ended": "the prompt's marks show it",
    "model": "own option",
    "draft": "own option",
    "chains": "a part of --draft",
    "shape": "its fields are options",
    "tokenizer": "a part of the model",
    "scheduling_policy": "prompts have no priorities",
    "max_queued_requests": "all prompts come at once",
    "speculative_method": "it comes with speculative_config",
    "role": "an engine that ends with its prompts has no others to work for",
    "speculation": "for servers; without --draft nothing is drafted",
    "prediction": "each prompt has its own",
}
OWN_OPTIONS = {"prompt", "prompts", "model", "draft", "chat", "as_json", "compare", "trace", "verbose", "help"}


@pytest.mark.parametrize("owner", OWNERS)
def test_every_field_has_help(owner: type) -> None:
    found = settings_of(owner)
    assert {each.name for each in fields(owner)} - set(found) <= {"scheduler", "limits"}
    for name, (_, facts) in found.items():
        assert facts.help.endswith("."), name
        assert facts.help[0].isupper() or facts.help.split()[0] in ("auto,", "raw_logprobs", "0"), name


def test_keywords_of_llm_are_the_fields() -> None:
    own = ("model", "draft", "chains")
    engine = {name: kind for name, (kind, _) in settings_of(EngineConfig).items() if name not in own}
    others = {
        name: kind for owner in (SchedulerConfig, RequestLimits) for name, (kind, _) in settings_of(owner).items()
    }
    declared = {**engine, **others}
    hints = get_type_hints(LLMSettings)
    assert set(hints) == set(declared)
    for name, field in declared.items():
        # A keyword may be left open, or written in another way.
        missing = set(kinds_of(field.type)) - set(kinds_of(hints[name]))
        assert not missing or (name, hints[name]) == ("verify", str), name


def test_options_are_the_fields() -> None:
    declared = {name for owner in OWNERS if owner is not BeamSearchParams for name in settings_of(owner)}
    options = {parameter.name for parameter in GENERATE.params}
    assert options - OWN_OPTIONS == declared - set(WITHOUT_OPTION)
    assert set(WITHOUT_OPTION) <= declared


def test_an_options_help_names_the_fields_default() -> None:
    helps = {parameter.name: parameter.help for parameter in GENERATE.params}
    assert helps["max_num_seqs"] == "Most requests running at once; default: 64."
    assert helps["adaptive_drafts"].endswith("; default: adaptive.")
    assert helps["temperature"].endswith("; default: the model's, else 0.")
    assert helps["seed"].endswith("; default: drawn anew.")


def test_keywords_are_sorted_into_their_dataclasses() -> None:
    config = engine_config({"max_num_seqs": np.int64(3), "block_size": 32})
    assert (config.scheduler.max_num_seqs, config.block_size) == (3, 32)
    assert type(config.scheduler.max_num_seqs) is int
    for name in ("max_seqs", "scheduler", "limits", "model"):
        with pytest.raises(ValueError, match=name):
            engine_config({name: 3})


@dataclass(frozen=True)
class Example:
    count: int = setting(1, least=1, most=5)
    share: float = setting(0.5, above=0, most=1)
    limit: int | None = setting(None, least=0, wanted="0 or more, or None")
    flag: bool = setting(False)
    kind: Literal["a", "b"] = setting("a")
    path: int | Path | None = setting(None)

    def __post_init__(self) -> None:
        check_settings(self)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        *(({"count": value}, "a whole number") for value in (2.5, "3", True, None, math.nan, np.float64(2), np.True_)),
        *(({"count": value}, "at least 1 and at most 5") for value in (0, 6, 10**400)),
        *(({"share": value}, "a number") for value in ("0.5", True, None, 1j)),
        *(({"share": value}, "above 0 and at most 1") for value in (0, 1.5, math.nan, math.inf, 10**400)),
        ({"limit": -1}, "0 or more, or None"),
        ({"limit": 1 << 63}, "below 2^63"),
        *(({"flag": value}, "True or False") for value in ("no", 0, None, np.True_)),
        *(({"kind": value}, "one of a, b") for value in ("c", None, 1)),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(values: dict[str, Any], message: str) -> None:
    ((name, value),) = values.items()
    with pytest.raises(ValueError, match=re.escape(f"{name} is {value!r}; it must be {message}") + "$"):
        Example(**values)


def test_numbers_of_numpy_become_pythons() -> None:
    example = Example(count=np.int32(3), share=np.float32(0.5), limit=np.uint8(7))  # type: ignore[arg-type]
    assert [type(value) for value in (example.count, example.share, example.limit)] == [int, float, int]
    assert (example.count, example.share, example.limit) == (3, 0.5, 7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 2.5}, "max_num_seqs is 2.5; it must be a whole number"),
        ({"logprobs_mode": "raw"}, "logprobs_mode is 'raw'; it must be one of raw_logprobs, processed_logprobs"),
        ({"enforce_eager": "no"}, "enforce_eager is 'no'; it must be True or False"),
        ({"adaptive_drafts": 1}, "adaptive_drafts is 1; it must be True or False"),
        ({"watermark": math.nan}, "watermark is nan; it must be"),
        ({"gpu_memory_utilization": math.nan}, "gpu_memory_utilization is nan; it must be above 0 and at most 1"),
        ({"block_size": 12}, "block_size is 12; it must be a multiple of 8"),
        ({"prefill_stretch": 1}, "prefill_stretch is 1; it must be above 1, or 0 for no limit"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy is 'lifo'; it must be one of fcfs, priority"),
    ],
)
def test_a_bad_setting_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine_config(settings)
