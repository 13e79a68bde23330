"""vLLM's speculative configuration: an object that names the draft source. Pure Python."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

# Bounds of vLLM's n-gram matches. They are checked; here the longest match counts, whatever its length.
_LOOKUP = ("prompt_lookup_min", "prompt_lookup_max")
KEYS = ("method", "model", "num_speculative_tokens", "draft_tensor_parallel_size", *_LOOKUP)
# The methods of draft models, by the names of the kinds of heads. What a folder holds is recognised by its content.
WITH_MODEL = ("draft_model", "eagle", "eagle3", "dflash", "dspark", "domino", "dflash2")
NGRAM = "ngram"


class SpeculativeConfig(NamedTuple):
    """Drafter that a speculative configuration names.

    Attributes:
        draft: folder of a head or of a small model, or "ngram".
        depth: most draft tokens in a row, None for the default.
        draft_tensor_parallel_size: ranks that share the draft model, None for the default.
        method: what the draft model is said to be, None if nothing is said.
    """

    draft: str
    depth: int | None
    draft_tensor_parallel_size: int | None = None
    method: str | None = None

    @property
    def shape(self) -> dict[str, int]:
        """The bounds of draft trees that are given."""
        return {} if self.depth is None else {"depth": self.depth}

    @property
    def settings(self) -> dict[str, int | str]:
        """The engine's settings that are given."""
        given = {"draft_tensor_parallel_size": self.draft_tensor_parallel_size, "speculative_method": self.method}
        return {name: value for name, value in given.items() if value is not None}


def parse_speculative_config(given: str | Mapping[str, Any], option: str) -> SpeculativeConfig:
    """Read vLLM's object, or its JSON, strictly.

    Args:
        option: what the messages call it.

    Raises:
        ValueError: no JSON object, an unknown key, or a value that this engine does not support.
    """
    config: Any = given
    if isinstance(given, str):
        try:
            config = json.loads(given)
        except ValueError as error:
            raise ValueError(f"{option} is {given!r}; it must be a JSON object: {error}") from None
    if not isinstance(config, Mapping):
        raise ValueError(f"{option} is {given!r}; it must be a JSON object")
    for key in config:
        if key not in KEYS:
            raise ValueError(f"{option} has the unknown key {key!r}; known are {', '.join(KEYS)}")
    said, model = config.get("method"), config.get("model")
    method, methods = said, (NGRAM, *WITH_MODEL)
    if method is None:
        method = "draft_model" if model is not None else NGRAM
    if method not in methods:
        raise ValueError(f"{option} has method {method!r}; it must be one of {', '.join(methods)}")
    if method == NGRAM and model not in (None, NGRAM):
        raise ValueError(f"{option} has method 'ngram' and model {model!r}; leave the model out")
    if method != NGRAM and (not isinstance(model, str) or not model):
        raise ValueError(f"{option} has model {model!r}; method {method!r} needs the folder of a head or small model")
    for key in _LOOKUP:
        length = config.get(key)
        if length is not None and (method != NGRAM or type(length) is not int or length < 1):
            raise ValueError(f"{option} has {key} {length!r}; it must be a whole number of at least 1, for 'ngram'")
    depth = config.get("num_speculative_tokens")
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or not 1 <= depth <= 64):
        raise ValueError(f"{option} has num_speculative_tokens {depth!r}; it must be a whole number from 1 to 64")
    size = config.get("draft_tensor_parallel_size")
    if size is not None and (type(size) is not int or size < 1 or (method == NGRAM and size > 1)):
        raise ValueError(
            f"{option} has draft_tensor_parallel_size {size!r}; it must be 1 or, for a draft model, "
            "tensor_parallel_size"
        )
    if method == NGRAM:
        return SpeculativeConfig(NGRAM, depth, size)
    return SpeculativeConfig(str(model), depth, size, said)
