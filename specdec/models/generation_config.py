"""End tokens and default sampling parameters of a checkpoint: generation_config.json, or a GGUF file's own keys."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specdec.core.sampling_params import SamplingParams
from specdec.draft_heads.llama.checkpoint_files import CheckpointError, read_object
from specdec.gguf.file import GgufFile, is_gguf

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GenerationConfig:
    """End tokens and default sampling parameters of a model.

    Attributes:
        end_tokens: tokens after which an output ends.
        params: the request parameters that the file sets, by their names in `SamplingParams`.
        unused: what else the file sets and transformers or llama.cpp would apply, by the file's names.
    """

    end_tokens: frozenset[int]
    params: dict[str, Any]
    unused: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "GenerationConfig":
        """Read generation_config.json, and end tokens that it does not name from config.json; or else a GGUF file.

        A warning names what is not used.

        Raises:
            CheckpointError: a file is not valid JSON, or a value is outside its parameter's range.
        """
        if is_gguf(folder):
            return cls(_gguf_ends(folder), *_gguf_sampling(folder))
        files = (folder / name for name in ("generation_config.json", "config.json"))
        settings, config = (read_object(file) if file.is_file() else {} for file in files)
        ends = settings.get("eos_token_id")
        if ends is None:
            ends = config.get("eos_token_id")
        found = ends if isinstance(ends, list) else [] if ends is None else [ends]
        vocab = config.get("vocab_size")
        vocab = vocab if isinstance(vocab, int) else math.inf
        for token in found:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                raise CheckpointError(f"{folder}: eos_token_id is {ends!r}; it must be token ids below {vocab}")
        params = {name: settings[name] for name in _NAMES if settings.get(name) is not None}
        params |= {own: settings[name] for name, own in _RENAMED.items() if settings.get(name) is not None}
        unused = _unused(settings, config.get("max_position_embeddings"))
        if settings.get("do_sample") is False:
            # In transformers the sampling parameters of such a file are without effect.
            params = {name: value for name, value in params.items() if name in _GREEDY}
            params["temperature"] = 0.0
            unused = {name: value for name, value in unused.items() if name not in _SAMPLED}
        _check(folder / "generation_config.json", params, unused)
        return cls(frozenset(found), params, unused)


def _check(file: Path, params: Mapping[str, Any], unused: Mapping[str, Any]) -> None:
    """Check a file's sampling parameters, and warn of what is not used.

    Raises:
        CheckpointError: a value is outside its parameter's range.
    """
    try:
        SamplingParams(**params)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{file}: {error}") from None
    if unused:
        logger.warning(f"{file.name}: not used: " + ", ".join(f"{name} ({unused[name]!r:.50})" for name in unused))


def _gguf_ends(file: Path) -> frozenset[int]:
    """Return the tokens that end an answer of a GGUF file; the log says which it does not name itself."""
    vocabulary = GgufFile.open(file).vocabulary
    if found := sorted(vocabulary.ends - vocabulary.named_ends):
        texts = ", ".join(f"{token} ({vocabulary.tokens[token]})" for token in found)
        logger.info(f"end tokens: those that {file.name} names, and by their texts, as in llama.cpp: {texts}")
    return vocabulary.ends


def _gguf_sampling(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the sampling parameters of a GGUF file, and what else of them llama.cpp would apply.

    Its converter takes them from generation_config.json.

    Raises:
        CheckpointError: a value is outside its parameter's range.
    """
    values = GgufFile.open(file).values
    given = {key.removeprefix(_GGUF): _plain(value) for key, value in values.items() if key.startswith(_GGUF)}
    params = {own: given[key] for key, own in _GGUF_NAMES.items() if key in given}
    changing = [key for key in given if key in _GGUF_UNUSED and given[key] != _GGUF_UNUSED[key]]
    unused = {f"{_GGUF}{key}": given[key] for key in changing}
    _check(file, params, unused)
    return params, unused


def _plain(value: Any) -> Any:
    """Return a GGUF file's value, a float32 as the shortest decimal that it is stored for: 0.6, not 0.60000002."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return float(str(np.float32(value))) if isinstance(value, float) else value


_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_GGUF = "general.sampling."
_GGUF_NAMES = {name: name for name in ("top_k", "top_p", "min_p")}
_GGUF_NAMES |= {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
# Keys that change which tokens llama.cpp generates, and the value that changes nothing; for `penalty_last_n` all tokens
# of the context, as here. The other keys, such as xtc_threshold and mirostat_tau, have an effect beside these alone.
_GGUF_UNUSED = {"sequence": None, "xtc_probability": 0, "mirostat": 0, "penalty_last_n": -1}
_RENAMED = {"max_new_tokens": "max_tokens", "stop_strings": "stop"}
# What greedy decoding heeds, and the unused fields that only sampling does.
_GREEDY = ("repetition_penalty", *_RENAMED.values())
_SAMPLED = ("typical_p", "top_h", "epsilon_cutoff", "eta_cutoff")
# Fields that change which tokens transformers (5.17 and before) generates, and their values that change nothing. Left
# out are fields of its caches, return values, own drafts and encoders, and padding and begin tokens.
_UNUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), (1,)),
    **dict.fromkeys(("typical_p", "top_h", "encoder_repetition_penalty"), (1,)),
    # Its effect begins above 1.
    "guidance_scale": (0, 1),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty", "penalty_alpha"), (0,)),
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "assistant_ensemble_weight"), (0,)),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"), ([], {})),
    **dict.fromkeys(("constraints", "force_words_ids", "forced_decoder_ids"), ([],)),
    "token_healing": (False,),
    # Once the default.
    "max_length": (20,),
    **dict.fromkeys(("max_time", "forced_bos_token_id", "forced_eos_token_id"), ()),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config", "dola_layers"), ()),
}


def _unused(settings: Mapping[str, Any], context: Any) -> dict[str, Any]:
    """Return the fields that are set to more than nothing and are not used.

    Args:
        context: the model's positions; a `max_length` of as many limits nothing.
    """
    given = {name: settings[name] for name in _UNUSED if settings.get(name) is not None}
    if isinstance(context, int) and isinstance(given.get("max_length"), int) and given["max_length"] >= context:
        del given["max_length"]
    return {name: value for name, value in given.items() if value not in _UNUSED[name]}
