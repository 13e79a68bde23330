"""Block heads of every known format, written from the formats' descriptions.

Names, shapes and conventions are those of z-lab's `dflash/model.py`, DeepSpec's `modeling/dspark`, SpecForge's exports,
JetSpec's, and speculators' `DFlashDraftModel` and `DSparkDraftModel`.
"""

from collections.abc import Callable
from typing import Any

import torch

from tests.block_heads import DIM, EPS, GROUP, HEADS, KV_HEADS, STATE, TAPS, Block, block
from tests.checkpoints import FEW, INTERMEDIATE, TARGET_HIDDEN, TARGET_LAYERS, VOCAB, Fixture, maps


def layers(head: Block, **settings: Any) -> dict[str, Any]:
    """Return what a config.json says of the layers."""
    return {
        "model_type": "qwen3" if head.qk_norm else "llama",
        "hidden_size": TARGET_HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "num_hidden_layers": head.layers,
        "vocab_size": VOCAB,
        "rms_norm_eps": EPS,
        "max_position_embeddings": 64,
        "rope_theta": head.theta,
        **settings,
    }


def without(head: Block, *parts: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in head.weights.items() if not name.startswith(parts)}


def fixture(config: dict[str, Any], tensors: dict[str, torch.Tensor], head: Block, **facts: Any) -> Fixture:
    return Fixture(config, tensors, head, facts=facts)  # type: ignore[arg-type]


def zlab_dflash() -> Fixture:
    """DFlash as z-lab publish it: no embedding, no output matrix, settings inside `dflash_config`."""
    head = block(31, anchor_first=False, size=6, layer_ids=(1, 3, 5))
    inner = {"mask_token_id": head.mask_token, "target_layer_ids": [1, 3, 5]}
    config = layers(head, architectures=["DFlashDraftModel"], block_size=6, dflash_config=inner)
    config["num_target_layers"] = TARGET_LAYERS
    return fixture(config, without(head, "embed", "lm_head"), head)


def jetspec() -> Fixture:
    """JetSpec: DFlash's tensors, causal inside a block."""
    head = block(32, anchor_first=False, causal=True)
    inner = {"mask_token_id": head.mask_token, "target_layer_ids": [1, 4], "causal_head": True}
    config = layers(head, architectures=["DFlashDraftModel"], block_size=head.size, dflash_config=inner)
    return fixture(config, without(head, "embed", "lm_head"), head)


def renamed_dflash() -> Fixture:
    """A release that calls the projection `encoder.fc`, and reads what enters the first layer."""
    head = block(33, layers=1, anchor_first=False, layer_ids=(-1, 7), qk_norm=False)
    inner = {"mask_token_id": head.mask_token, "target_layer_ids": [-1, 7], "causal": False}
    config = layers(head, architectures=["DFlashDraftModel"], block_size=head.size, dflash_config=inner)
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    tensors = {names.get(name, name): tensor for name, tensor in without(head, "embed", "lm_head").items()}
    return fixture(config, {f"model.{name}": tensor for name, tensor in tensors.items()}, head)


def deepspec_dspark() -> Fixture:
    """DSpark as DeepSpec write it: copies of embedding and output matrix, all settings at the top."""
    head = block(34, rank=8, confidence=True, theta=900.0)
    config = layers(head, architectures=["Qwen3DSparkModel"], block_size=head.size, target_layer_ids=[1, 4])
    config |= {"mask_token_id": head.mask_token, "markov_rank": 8, "markov_head_type": "vanilla", "num_anchors": 512}
    config |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    return fixture(config, head.weights, head)


def specforge_dspark() -> Fixture:
    """SpecForge's DSpark calls itself DFlash; the tensors tell."""
    head = block(35, rank=8, kind="gated")
    inner = {"mask_token_id": head.mask_token, "target_layer_ids": [1, 4], "projector_type": "dspark"}
    config = layers(head, architectures=["DFlashDraftModel"], block_size=head.size)
    return fixture({**config, "dflash_config": inner}, without(head, "embed", "lm_head"), head)


def speculators(head: Block, kind: str, **settings: Any) -> dict[str, Any]:
    layer = settings.pop("layer", {})
    return {
        "architectures": [
            {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator", "dflash2": "DFlash2DraftModel"}[kind]
        ],
        "speculators_model_type": kind,
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "org/target", "architectures": []}},
        "transformer_layer_config": layers(head, **layer),
        "draft_vocab_size": len(head.tokens or range(VOCAB)),
        "block_size": head.size,
        # Boundary ids.
        "aux_hidden_state_layer_ids": [layer + 1 for layer in head.layer_ids],
        "mask_token_id": head.mask_token,
        **settings,
    }


def speculators_dflash() -> Fixture:
    """Some tokens only, and a layer within a window, which is causal by default."""
    head = block(36, tokens=FEW, causal=(False, True), anchor_first=False, windows=(0, 7))
    layer = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7, "use_sliding_window": True}
    config = speculators(head, "dflash", layer=layer, sample_from_anchor=False)
    return fixture(config, {**without(head, "embed"), **maps(FEW)}, head, verifier="org/target")


def speculators_dspark() -> Fixture:
    """A recurrent Markov head over some tokens; the target's embedding."""
    head = block(37, layers=1, rank=4, kind="rnn", tokens=FEW, confidence=True)
    config = speculators(head, "dspark", markov_rank=4, markov_head_type="rnn", enable_confidence_head=True)
    return fixture(config, {**without(head, "embed"), **maps(FEW)}, head, verifier="org/target")


def speculators_dspark_whole() -> Fixture:
    """All tokens, first row unused."""
    head = block(38, rank=4, anchor_first=False)
    config = speculators(head, "dspark", sample_from_anchor=False, markov_rank=4)
    return fixture(config, without(head, "embed", "lm_head"), head, verifier="org/target")


def specforge_domino() -> Fixture:
    """Domino calls itself DFlash; its last row is not used."""
    head = block(39, rank=6, kind="domino")
    inner = {"mask_token_id": head.mask_token, "target_layer_ids": [1, 4], "projector_type": "domino"}
    inner |= {"emb_dim": 6, "gru_hidden_dim": STATE, "pure_draft_prefix_len": 1, "shift_label": True}
    config = layers(head, architectures=["DFlashDraftModel"], block_size=head.size, dflash_config=inner)
    return fixture(config, without(head, "embed_tokens", "lm_head"), head)


def dflash2_sizes(head: Block) -> dict[str, int]:
    return {"conv_kernel_size": TAPS, "conv_group_size": GROUP, "selector_rank": 4, "selector_top_k": head.top_k}


def zlab_dflash2() -> Fixture:
    """DFlash2 with a selector among seven candidates."""
    head = block(40, rank=4, kind="dflash2", anchor_first=False, top_k=7)
    inner = {"mask_token_id": head.mask_token, "target_layer_ids": [1, 4], **dflash2_sizes(head)}
    config = layers(head, architectures=["DFlash2DraftModel"], block_size=head.size, dflash_config=inner)
    return fixture(config, without(head, "embed", "lm_head"), head)


def speculators_dflash2() -> Fixture:
    """A layer within a window, which is not causal by default."""
    head = block(41, layers=1, rank=4, kind="dflash2", anchor_first=False, windows=(7,))
    layer = {"layer_types": ["sliding_attention"], "sliding_window": 7, "use_sliding_window": True}
    config = speculators(head, "dflash2", layer=layer, sample_from_anchor=False, **dflash2_sizes(head))
    return fixture(config, without(head, "embed", "lm_head"), head, verifier="org/target")


BLOCK_FORMATS: dict[str, Callable[[], Fixture]] = {
    make.__name__: make
    for make in (
        zlab_dflash,
        jetspec,
        renamed_dflash,
        deepspec_dspark,
        specforge_dspark,
        speculators_dflash,
        speculators_dspark,
        speculators_dspark_whole,
        specforge_domino,
        zlab_dflash2,
        speculators_dflash2,
    )
}
