"""vLLM's `--speculative-config`: a JSON object that names the draft source."""

import json
from typing import Any, NamedTuple

KEYS = ("method", "model", "num_speculative_tokens", "draft_tensor_parallel_size")
# The methods of draft models. What a folder holds is recognised by its content, so these load alike.
WITH_MODEL = ("draft_model", "eagle", "eagle3")
NGRAM = "ngram"


class SpeculativeConfig(NamedTuple):
    """Drafter that the JSON of `--speculative-config` names.

    Attributes:
        draft: folder of a head or of a small model, or "ngram".
        depth: most draft tokens in a row, None for the default.
    """

    draft: str
    depth: int | None


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """Read vLLM's JSON strictly.

    Raises:
        ValueError: no JSON object, an unknown key, or a value that this engine does not support.
    """
    option = "--speculative-config"
    try:
        config: Any = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{option} is {text!r}; it must be a JSON object: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{option} is {text!r}; it must be a JSON object")
    for key in config:
        if key not in KEYS:
            raise ValueError(f"{option} has the unknown key {key!r}; known are {', '.join(KEYS)}")
    method, model = config.get("method"), config.get("model")
    methods = (NGRAM, *WITH_MODEL)
    if method is None:
        method = "draft_model" if model is not None else NGRAM
    if method not in methods:
        raise ValueError(f"{option} has method {method!r}; it must be one of {', '.join(methods)}")
    if method == NGRAM and model not in (None, NGRAM):
        raise ValueError(f"{option} has method 'ngram' and model {model!r}; leave the model out")
    if method != NGRAM and (not isinstance(model, str) or not model):
        raise ValueError(f"{option} has model {model!r}; method {method!r} needs the folder of a head or small model")
    depth = config.get("num_speculative_tokens")
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or not 1 <= depth <= 64):
        raise ValueError(f"{option} has num_speculative_tokens {depth!r}; it must be a whole number from 1 to 64")
    if config.get("draft_tensor_parallel_size") not in (None, 1):
        size = config["draft_tensor_parallel_size"]
        raise ValueError(f"{option} has draft_tensor_parallel_size {size!r}; only 1 is supported")
    return SpeculativeConfig(NGRAM if method == NGRAM else str(model), depth)
