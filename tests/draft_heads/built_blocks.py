"""The block heads of `tests.block_heads` as the package's modules."""

import torch

from specdec.draft_heads.heads.block_head import BlockConfig, BlockHead
from specdec.draft_heads.heads.convolved_layer import ConvolutionConfig
from specdec.draft_heads.heads.edge_scorers import DominoConfig, MarkovConfig, SelectorConfig
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.draft_heads.llama.llama_layer import fuse_layer
from specdec.draft_heads.llama.rope import RopeConfig
from tests.block_heads import DIM, EPS, GROUP, HEADS, KV_HEADS, STATE, TAPS, Block
from tests.checkpoints import INTERMEDIATE, TARGET_HIDDEN, VOCAB


def built(head: Block, max_position: int = 64, dtype: torch.dtype = torch.float64) -> BlockHead:
    """Return the module."""
    llama = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=TARGET_HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_layers=head.layers,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        max_position=max_position,
        rms_norm_eps=EPS,
        rope=RopeConfig(theta=head.theta, original_max_position=max_position),
        qk_norm=head.qk_norm,
        windows=head.windows,
    )
    weights, first = dict(head.weights), head.weights.get("markov_head.markov_w1.weight")
    domino, selector = weights.get("embed_proj.0.weight"), weights.get("candidate_selector.hidden_projection.weight")
    for name in head.weights:
        if name.startswith(("prefix_gru", "embed_proj")):
            weights[f"domino_head.{name}"] = weights.pop(name)
    config = BlockConfig(
        llama,
        taps=tuple(layer + 1 for layer in head.layer_ids),
        block_size=head.size,
        mask_token=head.mask_token,
        anchor_first=head.anchor_first,
        causal=head.causal,
        draft_vocab_size=None if head.tokens is None else len(head.tokens),
        markov=None if first is None else MarkovConfig(first.shape[1], head.kind),
        domino=None if domino is None else DominoConfig(len(domino), STATE, head.prefix),
        selector=None if selector is None else SelectorConfig(len(selector), head.top_k),
        convolution=None if selector is None else ConvolutionConfig(TAPS, GROUP),
        confidence="confidence_head.proj.weight" in weights,
    )
    module = BlockHead(config).to(dtype)
    if head.tokens is None:
        del weights["lm_head.weight"]
    for layer in range(head.layers):
        fuse_layer(weights, f"layers.{layer}.", module.llama)
    assert not module.load_state_dict(weights, strict=False).unexpected_keys
    if head.tokens is not None:
        module.draft_tokens.copy_(torch.tensor(head.tokens))
    return module
