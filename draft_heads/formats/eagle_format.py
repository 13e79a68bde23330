"""EAGLE-1/2 heads in files: the official layout, and what vLLM, SGLang and speculators made of it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from specdec.draft_heads.formats.draft_vocab import mapped_tokens
from specdec.draft_heads.formats.head_description import HeadDescription, Source
from specdec.draft_heads.formats.head_settings import HeadSettings, Layout
from specdec.draft_heads.formats.head_tensors import HeadTensors
from specdec.draft_heads.heads.eagle import EagleConfig, EagleHead
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.draft_heads.llama.llama_layer import fuse_layer, split_layer

# Keys by which config.json says that fc has a bias.
FC_BIAS_KEYS = ("bias", "eagle_fc_bias", "fusion_bias")
# Official heads use the target's output matrix; these carry a copy, of some rows perhaps.
WITH_OUTPUT = (Layout.VLLM, Layout.SGLANG)


def describe_eagle(settings: HeadSettings, tensors: HeadTensors) -> HeadDescription:
    """Recognise an EAGLE-1/2 head.

    Raises:
        CheckpointError: a setting that is not honoured, or tensors that are not what the settings ask for.
    """
    llama, assumptions = settings.llama(tensors)
    said = [settings.own[key] for key in FC_BIAS_KEYS if settings.own.get(key) is not None]
    has_bias = "fc.bias" in tensors
    if not said:
        assumptions.append(f"config.json is silent about a bias of fc: the file has {'one' if has_bias else 'none'}")
    if "embed_tokens.weight" not in tensors:
        assumptions.append("the file has no embedding: the target's")
    tokens, rows, guesses = _output_rows(settings, tensors, llama.vocab_size)
    config = EagleConfig(llama, has_bias or any(said))
    embedding = Source.FILE if "embed_tokens.weight" in tensors else Source.TARGET
    output = Source.FILE if _has_output(settings, tensors) else Source.TARGET
    return HeadDescription(
        kind="EAGLE-1/2",
        layout=settings.layout,
        config=config,
        tensors=tensors,
        expected=_expected(config, embedding, output, rows),
        embedding=embedding,
        output=output,
        tokens=tokens,
        verifier=settings.verifier,
        assumptions=(*assumptions, *guesses),
    )


def _has_output(settings: HeadSettings, tensors: HeadTensors) -> bool:
    return settings.layout in WITH_OUTPUT and "lm_head.weight" in tensors


def _output_rows(settings: HeadSettings, tensors: HeadTensors, vocab_size: int) -> tuple[Tensor | None, int, list[str]]:
    """The tokens that are scored, None for all; rows of the file's own output matrix; what was assumed."""
    frequent = settings.size("truncated_vocab_size", settings.size("hot_vocab_size", vocab_size))
    matrix = tensors.by_name["lm_head.weight"] if _has_output(settings, tensors) else None
    is_whole = matrix is None or len(matrix) == vocab_size
    if "token_map" in tensors and settings.layout in WITH_OUTPUT:
        tokens = mapped_tokens(tensors.by_name["token_map"], vocab_size)
        if len(tokens) != frequent:
            raise CheckpointError(f"token_map holds {len(tokens)} tokens, config.json says {frequent}")
        return tokens, vocab_size if is_whole else frequent, []
    if frequent == vocab_size:
        return None, vocab_size, []
    if not is_whole:
        raise CheckpointError(f"lm_head.weight is of {frequent} tokens; without a token_map nobody knows of which")
    return None, vocab_size, [f"which {frequent} tokens are frequent, as config.json says, is not told: all are scored"]


def _expected(config: EagleConfig, embedding: Source, output: Source, output_rows: int) -> dict[str, list[int]]:
    with torch.device("meta"):
        named = to_official(dict(EagleHead(config).named_parameters()), config)
        if output == Source.FILE:
            named["lm_head.weight"] = torch.empty(output_rows, config.llama.hidden_size)
    if embedding == Source.TARGET:
        del named["embed_tokens.weight"]
    return {name: list(tensor.shape) for name, tensor in named.items()}


def to_official(parameters: Mapping[str, Tensor], config: EagleConfig) -> dict[str, Tensor]:
    """A head's parameters under the names of the official layout."""
    named = dict(parameters)
    for layer in range(config.llama.num_layers):
        split_layer(named, f"layers.{layer}.", config.llama)
    return named


def from_official(tensors: Mapping[str, Tensor], config: EagleConfig) -> dict[str, Tensor]:
    """The inverse."""
    named = dict(tensors)
    for layer in range(config.llama.num_layers):
        fuse_layer(named, f"layers.{layer}.")
    return named
