"""Parts that only some block heads have, as their tensors and config.json show them."""

from typing import NamedTuple

from specdec.draft_heads.formats.block_settings import BlockSettings
from specdec.draft_heads.formats.head_tensors import HeadTensors
from specdec.draft_heads.heads.convolved_layer import ConvolutionConfig
from specdec.draft_heads.heads.edge_scorers import (
    CANDIDATES,
    MARKOV_KINDS,
    DominoConfig,
    MarkovConfig,
    SelectorConfig,
)
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.draft_heads.llama.llama_config import positive

MARKOV, CONFIDENCE, DOMINO, SELECTOR = "markov_head.", "confidence_head.", "domino_head.", "candidate_selector."


class BlockParts(NamedTuple):
    """Edge scorer and convolutions of a head, by the names of `BlockConfig`; None where it has none."""

    markov: MarkovConfig | None
    domino: DominoConfig | None
    selector: SelectorConfig | None
    convolution: ConvolutionConfig | None


def block_parts(own: BlockSettings, tensors: HeadTensors, hidden_size: int) -> BlockParts:
    """Return the parts of a head.

    Raises:
        CheckpointError: config.json contradicts the tensors.
    """
    return BlockParts(_markov(own, tensors), _domino(own, tensors), *_selector(own, tensors, hidden_size))


def _markov(own: BlockSettings, tensors: HeadTensors) -> MarkovConfig | None:
    weight = tensors.by_name.get(f"{MARKOV}markov_w1.weight")
    rank = 0 if weight is None or weight.ndim != 2 else weight.shape[1]
    signs = {"markov_head.gate_proj.weight": "gated", "markov_head.joint_proj.weight": "rnn"}
    kind = next((kind for name, kind in signs.items() if name in tensors), MARKOV_KINDS[0])
    for key, found in (("markov_rank", rank), ("markov_head_type", kind)):
        if rank or key == "markov_rank":
            _agree(own, key, found)
    return MarkovConfig(rank, kind) if rank else None


def _domino(own: BlockSettings, tensors: HeadTensors) -> DominoConfig | None:
    if not any(name.startswith(DOMINO) for name in tensors.by_name):
        return None
    size = _columns(tensors, own, f"{DOMINO}prefix_gru.weight_hh_l0", "gru_hidden_dim")
    rank = _columns(tensors, own, f"{DOMINO}embed_proj.2.weight", "emb_dim")
    first = own.value("pure_draft_prefix_len") or 0
    if type(first) is not int or first < 0:
        raise CheckpointError(f"config.json: pure_draft_prefix_len = {first!r} must be a whole number of at least 0")
    return DominoConfig(rank, size, first)


def _selector(
    own: BlockSettings, tensors: HeadTensors, hidden_size: int
) -> tuple[SelectorConfig | None, ConvolutionConfig | None]:
    selector = convolution = None
    if any(name.startswith(SELECTOR) for name in tensors.by_name):
        rank = _columns(tensors, own, f"{SELECTOR}predecessor_codebook", "selector_rank")
        top_k = _number(own, "selector_top_k", 16)
        if top_k > CANDIDATES:
            raise CheckpointError(
                f"config.json: selector_top_k = {top_k} is not supported; it may be at most {CANDIDATES}"
            )
        selector = SelectorConfig(rank, top_k)
    if tensors.has("attention_conv.base_kernel") or tensors.has("mlp_conv.base_kernel"):
        taps, group = _number(own, "conv_kernel_size", 2), _number(own, "conv_group_size", 16)
        if hidden_size % group:
            raise CheckpointError(f"config.json: conv_group_size = {group} does not divide hidden_size {hidden_size}")
        convolution = ConvolutionConfig(taps, group)
    return selector, convolution


def _columns(tensors: HeadTensors, own: BlockSettings, name: str, key: str) -> int:
    """Return the columns of a matrix, which config.json may name by a key; 1 if it is missing, which is told later."""
    matrix = tensors.by_name.get(name)
    if matrix is None or matrix.ndim != 2 or not matrix.shape[1]:
        return 1
    _agree(own, key, matrix.shape[1])
    return matrix.shape[1]


def _number(own: BlockSettings, key: str, default: int) -> int:
    return positive({key: own.value(key)}, key, default)


def _agree(own: BlockSettings, key: str, found: object) -> None:
    named = own.value(key)
    if named is not None and named != found:
        raise CheckpointError(f"config.json: {key} = {named!r}, but the tensors are those of {found!r}")
