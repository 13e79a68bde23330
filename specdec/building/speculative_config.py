"""vLLM's speculative configuration: an object that names the draft source. Pure Python."""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from specdec.draft_heads.drafting.chain_sources import NGRAM, SUFFIX
from specdec.kernels.types.settings import Foreign
from specdec.kv_transfer.kv_transfer_config import read_object

logger = logging.getLogger(__name__)
# Bounds of vLLM's n-gram matches. They are checked; here the longest match counts, whatever its length.
_LOOKUP = ("prompt_lookup_min", "prompt_lookup_max")
# Keys that are settings of the engine, by its names.
_SETTINGS = {
    "revision": "draft_revision",
    "kv_cache_dtype": "draft_kv_cache_dtype",
    "enable_adaptive_verification": "adaptive_drafts",
}
KEYS = ("method", "model", "num_speculative_tokens", "draft_tensor_parallel_size", *_SETTINGS, *_LOOKUP)
# The methods of draft models, by the names of the kinds of heads. What a folder holds is recognised by its content.
WITH_MODEL = ("draft_model", "eagle", "eagle3", "dflash", "dspark", "domino", "dflash2")
WITHOUT_MODEL = (NGRAM, SUFFIX)

_NO_EFFECT = Foreign("", None)
_TRUE_RULES = "tokens are accepted by an exact rule; --verify chooses it"
# vLLM's other keys (config/speculative.py). Those without an effect choose kernels, or how and when it drafts, on which
# no output depends.
FOREIGN = {
    "draft_sample_method": Foreign("drafts are drawn as --verify needs them", ("greedy", "probabilistic")),
    "rejection_sample_method": Foreign(_TRUE_RULES, ("standard", "block")),
    "synthetic_acceptance_rates": Foreign(_TRUE_RULES),
    "synthetic_acceptance_length": Foreign(_TRUE_RULES),
    "use_heterogeneous_vocab": Foreign("take a draft model with the target's vocabulary", (False,)),
    **dict.fromkeys(
        (
            "adaptive_verification_ema_alpha",
            "attention_backend",
            "code_revision",
            "disable_by_batch_size",
            "disable_eagle_block_drop",
            "disable_logprobs",
            "disable_log_stats",
            "disable_lookahead_block_hashes",
            "disable_padded_drafter_batch",
            "draft_lm_head_quantization",
            "draft_load_config",
            "dspark_draft_topk",
            "enforce_eager",
            "index_share_for_mtp_iteration",
            "max_model_len",
            "moe_backend",
            "num_speculative_tokens_per_batch_size",
            "parallel_drafting",
            "quantization",
            "suffix_decoding_max_cached_requests",
            "suffix_decoding_max_spec_factor",
            "suffix_decoding_max_tree_depth",
            "suffix_decoding_min_token_prob",
            "use_local_argmax_reduction",
        ),
        _NO_EFFECT,
    ),
}


class SpeculativeConfig(NamedTuple):
    """Drafter that a speculative configuration names.

    Attributes:
        draft: folder of a head or of a small model, or the name of a source that needs none.
        shape: the bounds of draft trees that are given.
        settings: the engine's settings that are given.
    """

    draft: str
    shape: dict[str, int]
    settings: dict[str, Any]


def parse_speculative_config(given: str | Mapping[str, Any], option: str) -> SpeculativeConfig:
    """Read vLLM's object, or its JSON, strictly; keys without an effect here are named in one warning.

    Args:
        option: what the messages call it.

    Raises:
        ValueError: no JSON object, an unknown key, or a value that this engine does not support.
    """
    config = {key: value for key, value in read_object(given, option).items() if value is not None}
    for key, value in config.items():
        if key in FOREIGN:
            FOREIGN[key].check(f"{option}.{key}", value)
        elif key not in KEYS:
            raise ValueError(f"{option} has the unknown key {key!r}; known are {', '.join(KEYS)}")
    ignored = [key for key in config if key in FOREIGN]
    if ignored:
        logger.warning("%s: without effect here: %s", option, ", ".join(ignored))
    return SpeculativeConfig(_draft(config, option), _shape(config, option), _engine_settings(config, option))


def _draft(config: Mapping[str, Any], option: str) -> str:
    model, methods = config.get("model"), (*WITHOUT_MODEL, *WITH_MODEL)
    method = config.get("method", NGRAM if model is None else "draft_model")
    if method not in methods:
        raise ValueError(f"{option} has method {method!r}; it must be one of {', '.join(methods)}")
    for key in _LOOKUP:
        length = config.get(key)
        if length is not None and (method != NGRAM or type(length) is not int or length < 1):
            raise ValueError(f"{option} has {key} {length!r}; it must be a whole number of at least 1, for 'ngram'")
    if method in WITHOUT_MODEL:
        if model not in (None, method):
            raise ValueError(f"{option} has method {method!r} and model {model!r}; leave the model out")
        return str(method)
    if not isinstance(model, str) or not model:
        raise ValueError(f"{option} has model {model!r}; method {method!r} needs the folder of a head or small model")
    return model


def _shape(config: Mapping[str, Any], option: str) -> dict[str, int]:
    depth = config.get("num_speculative_tokens")
    if depth is None:
        return {}
    if type(depth) is not int or not 1 <= depth <= 64:
        raise ValueError(f"{option} has num_speculative_tokens {depth!r}; it must be a whole number from 1 to 64")
    return {"depth": depth}


def _engine_settings(config: Mapping[str, Any], option: str) -> dict[str, Any]:
    method = config.get("method")
    has_model = method not in WITHOUT_MODEL and "model" in config
    size, is_adaptive = config.get("draft_tensor_parallel_size"), config.get("enable_adaptive_verification")
    if size is not None and (type(size) is not int or size < 1 or (not has_model and size > 1)):
        raise ValueError(
            f"{option} has draft_tensor_parallel_size {size!r}; it must be 1 or, for a draft model, "
            "tensor_parallel_size"
        )
    if is_adaptive is not None and type(is_adaptive) is not bool:
        raise ValueError(f"{option} has enable_adaptive_verification {is_adaptive!r}; it must be true or false")
    given = {own: config[key] for key, own in _SETTINGS.items() if key in config}
    given |= {} if size is None else {"draft_tensor_parallel_size": size}
    return given | ({"speculative_method": method} if has_model and method is not None else {})
