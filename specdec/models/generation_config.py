"""Settings of a checkpoint's generation_config.json: end tokens and default sampling parameters."""

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.core.sampling_params import SamplingParams
from specdec.draft_heads.llama.checkpoint_files import CheckpointError, read_object
from specdec.models.gguf_file import GgufFile, is_gguf

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GenerationConfig:
    """End tokens and default sampling parameters of a model.

    Attributes:
        end_tokens: tokens after which an output ends.
        params: the request parameters that the file sets, by their names in `SamplingParams`.
    """

    end_tokens: frozenset[int]
    params: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "GenerationConfig":
        """Read generation_config.json; end tokens that it does not name are read from config.json or a GGUF file.

        Raises:
            CheckpointError: a file is not valid JSON, or a value is outside its parameter's range.
        """
        if is_gguf(folder):
            return cls(_gguf_ends(folder), {})
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
        if settings.get("max_new_tokens") is not None:
            params["max_tokens"] = settings["max_new_tokens"]
        if settings.get("do_sample") is False:
            # In transformers the sampling parameters of such a file are without effect.
            params = {name: value for name, value in params.items() if name in ("repetition_penalty", "max_tokens")}
            params["temperature"] = 0.0
        try:
            SamplingParams(**params)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{folder / 'generation_config.json'}: {error}") from None
        return cls(frozenset(found), params)


def _gguf_ends(file: Path) -> frozenset[int]:
    """Return the tokens that end an answer of a GGUF file; the log says which it does not name itself."""
    vocabulary = GgufFile.open(file).vocabulary
    if found := sorted(vocabulary.ends - vocabulary.named_ends):
        texts = ", ".join(f"{token} ({vocabulary.tokens[token]})" for token in found)
        logger.info(f"end tokens: those that {file.name} names, and by their texts, as in llama.cpp: {texts}")
    return vocabulary.ends


_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
