"""Keywords of vLLM's `LLM` and its calls: other names, and those that may only ask for nothing."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from specdec.building.llm_settings import LLMSettings
from specdec.building.speculative_config import parse_speculative_config
from specdec.config import AUTO
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.kernels.types.settings import Foreign

_NO_EFFECT = Foreign("", None)
# vLLM's other names of dtypes.
_DTYPES = {"half": "float16", "float": "float32"}
FOREIGN_ENGINE = {
    # Code of a checkpoint is never run.
    "trust_remote_code": _NO_EFFECT,
    "attention_backend": _NO_EFFECT,
    "async_scheduling": _NO_EFFECT,
    "enable_expert_parallel": _NO_EFFECT,
    "data_parallel_size": Foreign("an engine is one replica; start several", (1,)),
    "enable_chunked_prefill": Foreign("long prompts are always split; see long_prefill_token_threshold", (True,)),
    "tokenizer_mode": Foreign("tokenizers are those of tokenizer.json", ("auto", "hf")),
    "skip_tokenizer_init": Foreign("give prompts as token ids and detokenize=False", (False,)),
    "tokenizer_revision": Foreign("give the tokenizer's folder"),
    "load_format": Foreign("checkpoints are safetensors or torch files, as they are found", ("auto",)),
    "cpu_offload_gb": Foreign("all weights are on the device", (0, 0.0)),
    "max_cpu_loras": _NO_EFFECT,
    "lora_dtype": Foreign("adapters have the dtype of the model; see dtype", ("auto",)),
    "fully_sharded_loras": Foreign("ranks split adapters as they split the weights beside them", (False,)),
    "enable_sleep_mode": Foreign("use close()", (False,)),
    "generation_config": Foreign("defaults are those of the checkpoint; give SamplingParams for others", ("auto",)),
    "runner": Foreign("this engine generates text", ("auto", "generate")),
    "task": Foreign("this engine generates text", ("auto", "generate")),
    "hf_overrides": Foreign("change the checkpoint's config.json", ({},)),
    "limit_mm_per_prompt": Foreign("prompts are text or token ids", ({}, {"image": 0}, {"image": 0, "video": 0})),
    # It says how, and never what, is computed.
    "compilation_config": _NO_EFFECT,
    # Here there is no such thing, or no limit.
    "disable_custom_all_reduce": _NO_EFFECT,
    "disable_log_stats": _NO_EFFECT,
    "max_logprobs": _NO_EFFECT,
    # Preempted requests are computed again, or load what a connector has of them.
    "swap_space": _NO_EFFECT,
}

# Arguments of its calls.
FOREIGN_CALL = {
    "tokenization_kwargs": Foreign("use truncate_prompt_tokens, or give token ids", ({},)),
    "mm_processor_kwargs": Foreign("prompts are text or token ids", ({},)),
    "chat_template_content_format": Foreign("it is found in the chat template", ("auto",)),
}
# A search shows no bar, and takes as many prompts at once as have seats.
FOREIGN_SEARCH = {
    "use_tqdm": _NO_EFFECT,
    "concurrency_limit": _NO_EFFECT,
}


class VLLMKeywords(TypedDict, total=False):
    """Keywords of vLLM's `LLM` beside those of `LLMSettings`; docs/vllm.md has the table.

    `speculative_config` names the draft, and `kv_cache_memory_bytes` is `kv_cache_memory`. Others are in
    `FOREIGN_ENGINE`, with the values that they may have.
    """

    speculative_config: Mapping[str, Any] | None
    kv_cache_memory_bytes: int | str | None
    trust_remote_code: bool
    attention_backend: str | None
    async_scheduling: bool | None
    enable_expert_parallel: bool
    data_parallel_size: int
    enable_chunked_prefill: bool | None
    tokenizer_mode: str
    skip_tokenizer_init: bool
    tokenizer_revision: str | None
    load_format: str
    cpu_offload_gb: float
    max_cpu_loras: int | None
    lora_dtype: str
    fully_sharded_loras: bool
    enable_sleep_mode: bool
    generation_config: str
    runner: str
    task: str
    hf_overrides: dict[str, Any] | None
    limit_mm_per_prompt: dict[str, Any] | None
    compilation_config: Any
    disable_custom_all_reduce: bool
    disable_log_stats: bool
    max_logprobs: int
    swap_space: float


class LLMKeywords(LLMSettings, VLLMKeywords, total=False):
    """All keywords of `LLM` and `AsyncLLM`."""


def own_settings(
    model: str | Path | None, draft: str | Path | None, keywords: LLMKeywords
) -> tuple[str | Path | None, LLMSettings]:
    """Return the draft, and keywords of `LLMSettings` alone, none of them None.

    Args:
        model, draft: as `LLM` takes them.

    Raises:
        ValueError: a value of vLLM's that is not supported; names the keyword and the remedy.
    """
    given: dict[str, Any] = {name: value for name, value in keywords.items() if value is not None}
    for name in [name for name in given if name in FOREIGN_ENGINE]:
        FOREIGN_ENGINE[name].check(name, given.pop(name))
    if "kv_cache_memory_bytes" in given:
        if "kv_cache_memory" in given:
            raise ValueError("kv_cache_memory and kv_cache_memory_bytes are the same; leave one out")
        given["kv_cache_memory"] = given.pop("kv_cache_memory_bytes")
    if "dtype" in given:
        # A torch.dtype or its name.
        name = str(given["dtype"]).removeprefix("torch.")
        given["dtype"] = _DTYPES.get(name, name)
    if "tokenizer" in given and str(given["tokenizer"]) == str(model):
        del given["tokenizer"]
    if "speculative_config" in given:
        if draft not in (None, AUTO):
            raise ValueError(f"draft is {str(draft)!r} and speculative_config is given; leave one out")
        named = parse_speculative_config(given.pop("speculative_config"), "speculative_config")
        draft, bounds = named.draft, named.shape
        given |= named.settings
        if bounds:
            shape = given.get("shape")
            given["shape"] = replace(shape, **bounds) if isinstance(shape, DraftShape) else {**(shape or {}), **bounds}
    return draft, given  # type: ignore[return-value]
