"""Keywords of `LLM`, and the `EngineConfig` that they make. Pure Python: the command line checks options by it."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypedDict

from specdec.config import EngineConfig, ExecutorBackend
from specdec.core.outputs import LogprobsMode
from specdec.core.request_limits import RequestLimits
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.kernels.types.settings import KernelChoice, KVCacheDtype, Quantization, size_in_bytes, unknown_name
from specdec.kv_transfer.kv_transfer_config import KVTransferConfig, Role, parse_kv_transfer_config
from specdec.scheduling.scheduler_config import Policy, SchedulerConfig


class LLMSettings(TypedDict, total=False):
    """Keywords of `LLM`: the fields of `EngineConfig`, and of its `SchedulerConfig` and `RequestLimits`, where they are
    described.

    None stands for the default.
    """

    speculative_method: str | None
    tokenizer: str | Path | None
    seed: int | None
    revision: str | None
    draft_revision: str | None
    dtype: str | Any
    device: str
    shape: DraftShape | Mapping[str, Any] | None
    verify: str
    logprobs_mode: LogprobsMode
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_num_partial_prefills: int
    long_prefill_token_threshold: int
    scheduling_policy: Policy
    prefill_stretch: float
    adaptive_drafts: bool
    watermark: float
    max_queued_requests: int | None
    max_model_len: int | None
    kv_cache_memory: int | str | None
    kv_cache_dtype: KVCacheDtype
    draft_kv_cache_dtype: KVCacheDtype | None
    gpu_memory_utilization: float
    block_size: int | None
    enable_prefix_caching: bool | None
    kv_transfer_config: KVTransferConfig | str | Mapping[str, Any] | None
    role: Role
    kernels: KernelChoice
    reasoning_parser: str | None
    structured_compile_timeout: float
    structured_max_bytes: int
    threads: int | None
    tensor_parallel_size: int | None
    pipeline_parallel_size: int | None
    distributed_executor_backend: ExecutorBackend
    draft_tensor_parallel_size: int | None
    quantization: Quantization | None
    enable_lora: bool | None
    max_loras: int | None
    max_lora_rank: int | None
    draft_window_size: int | None
    draft_store_tokens: int
    draft_corpus: Sequence[str] | str | Path
    draft_store_shared: bool
    draft_options: Sequence[str]
    plugins: Sequence[str]
    collect_drafts: str | Path | None
    collect_drafts_share: float
    collect_drafts_limit: float
    enforce_eager: bool
    max_bad_words: int
    max_bad_word_tokens: int
    max_stop_strings: int
    max_stop_characters: int
    max_stop_token_ids: int
    max_logit_bias: int
    max_allowed_token_ids: int
    max_choices: int
    max_choice_characters: int
    max_text_characters: int


def engine_config(settings: Mapping[str, Any]) -> EngineConfig:
    """Sort keywords of `LLM` into an `EngineConfig`, whose model and drafts are open.

    Raises:
        ValueError: an unknown keyword, or a value outside its range.
    """
    scheduler, limits = _fields_of(SchedulerConfig, settings), _fields_of(RequestLimits, settings)
    others = {name: value for name, value in settings.items() if name not in scheduler | limits}
    for name, example in {"scheduler": "max_num_seqs", "limits": "max_bad_words"}.items():
        if name in others:
            raise ValueError(f"{name} is no keyword; give its settings, such as {example}")
    for name in ("chains", "ngrams", "suffix"):
        if name in others:
            raise ValueError(f'unknown keyword {name}; use draft="ngram" or draft="suffix"')
    known = LLMSettings.__annotations__
    for name in others:
        if name not in known:
            raise unknown_name("LLM", name, [*known, "speculative_config"])
    for name in ("plugins", "draft_options"):
        if isinstance(given := others.get(name, ()), str) or not all(isinstance(each, str) for each in given):
            raise ValueError(f"{name} is {given!r}; it must be a list of texts")
        if name in others:
            others[name] = tuple(given)
    for name in ("tokenizer", "collect_drafts"):
        if others.get(name) is not None:
            others[name] = Path(others[name])
    files = others.get("draft_corpus")
    if files is not None:
        others["draft_corpus"] = (str(files),) if isinstance(files, str | Path) else tuple(map(str, files))
    if others.get("kv_cache_memory") is not None:
        others["kv_cache_memory"] = size_in_bytes("kv_cache_memory", others["kv_cache_memory"])
    if others.get("kv_transfer_config") is not None:
        others["kv_transfer_config"] = parse_kv_transfer_config(others["kv_transfer_config"])
    return EngineConfig(scheduler=SchedulerConfig(**scheduler), limits=RequestLimits(**limits), **others)


def sharing_a_gpu(settings: Mapping[str, Any], number: int, count: int) -> dict[str, Any]:
    """Return the settings with which one of several engines of a process leaves a GPU's memory to those after it.

    An engine counts all that is in use, also by those before it.

    Args:
        number: the engine's place in the order of loading, from 1.
        count: number of the engines.
    """
    shared, own = dict(settings), settings.get("gpu_memory_utilization")
    if settings.get("kv_cache_memory") is None:
        most = EngineConfig.gpu_memory_utilization if own is None else own
        shared["gpu_memory_utilization"] = most * number / count
    return shared


def _fields_of(owner: type[SchedulerConfig | RequestLimits], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that are fields of a dataclass."""
    names = {each.name for each in fields(owner)}
    return {name: value for name, value in settings.items() if name in names}
