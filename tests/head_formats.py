"""Draft heads of every known format, written from the formats' descriptions.

Names, shapes and conventions are those of official EAGLE (`cnets1.py`, `cnets.py`), vLLM (`llama_eagle.py`,
`llama_eagle3.py`, `configs/eagle.py`), SGLang (`llama_eagle3.py`), SpecForge's exports and speculators'
`Eagle3DraftModel`.
"""

from collections.abc import Callable
from typing import Any

import torch

from tests.checkpoints import (
    FEW,
    TARGET_EMBED,
    TARGET_HIDDEN,
    TARGET_OUT,
    VOCAB,
    Fixture,
    eagle,
    eagle3,
    llama_config,
    maps,
    named,
    qkv_biases,
    random_weight,
    speculators_config,
)


def official_eagle() -> Fixture:
    """Return a head as SafeAILab publish it: a pickle, fc with a bias, and a config.json that does not mention one."""
    head = eagle(1, fc_bias=True, theta=500000.0)
    config = llama_config(head, architectures=["LlamaForCausalLM"], rope_theta=500000.0)
    return Fixture(config, named(head, "layers.0.", ("out",)), head, pickled=True)


def official_eagle_qwen2() -> Fixture:
    """A head of Qwen2: biases of queries, keys and values; no bias of fc; without the embedding."""
    head = eagle(2, extra=qkv_biases(), theta=700.0)
    head.weights["embed"] = TARGET_EMBED
    config = llama_config(head, architectures=["LlamaForCausalLM"], rope_theta=700.0, bias=False, qkv_bias=True)
    return Fixture(config, named(head, "layers.0.", ("out", "embed")), head)


def vllm_eagle_nested() -> Fixture:
    """The first layout of vLLM: the Llama's config.json inside, a copy of some rows of lm_head, and a map of them."""
    tokens = [40, 3, 52, 17, 0, 26, 9]
    head = eagle(3, fc_bias=True, tokens=tokens)
    head.weights["out"] = head.weights["out"][tokens]
    model = {**llama_config(head), "architectures": ["LlamaForCausalLM"], "eagle_fc_bias": True}
    config = {
        "model_type": "eagle",
        "model": model,
        "truncated_vocab_size": len(tokens),
        "architectures": ["EAGLEModel"],
    }
    tensors = named(head, "layers.0.", prefix="model.")
    tensors = {name.replace("model.fc.", "fc."): tensor for name, tensor in tensors.items()}
    return Fixture(config, {**tensors, "token_map": torch.tensor(tokens)}, head)


def vllm_eagle_mapped() -> Fixture:
    """A map of frequent tokens over a whole copy of lm_head."""
    tokens = [11, 4, 31]
    head = eagle(4, tokens=tokens)
    whole = head.weights["out"]
    head.weights["out"] = whole[tokens]
    config = {"model_type": "eagle", "model": llama_config(head), "truncated_vocab_size": len(tokens)}
    tensors = {**named(head, "layers.0."), "lm_head.weight": whole, "token_map": torch.tensor(tokens)}
    return Fixture(config, tensors, head)


def vllm_eagle() -> Fixture:
    """The present layout of vLLM: official names, without the embedding, which is the target's."""
    head = eagle(5)
    head.weights["embed"] = TARGET_EMBED
    config = llama_config(head, architectures=["EagleLlamaForCausalLM"], num_hidden_layers=None)
    return Fixture(config, named(head, "layers.0.", ("out", "embed"), prefix="model."), head)


def sglang_eagle() -> Fixture:
    """SGLang: its own architecture, a copy of lm_head, a number of frequent tokens that the server is told."""
    head = eagle(6, fc_bias=True)
    config = llama_config(head, architectures=["LlamaForCausalLMEagle"], bias=True, hot_vocab_size=32)
    return Fixture(config, named(head, "layers.0."), head)


def speculators_eagle() -> Fixture:
    """The layout of speculators before 0.6: `fusion_fc` and `transformer`."""
    head = eagle(7, fc_bias=True)
    tensors = named(head, "transformer.", ("out",))
    tensors = {name.replace("fc.", "fusion_fc."): tensor for name, tensor in tensors.items()}
    config = speculators_config(head, "eagle", fusion_bias=True, layernorms=False)
    return Fixture(config, tensors, head, facts={"verifier": "org/target"})


def official_eagle3() -> Fixture:
    """Return one as SafeAILab publish it: a pickle without embedding; config.json as in traineagle3, no rope_theta."""
    head = eagle3(8)
    head.weights["embed"] = TARGET_EMBED
    config = llama_config(head, architectures=["LlamaForCausalLM"], draft_vocab_size=len(FEW))
    return Fixture(config, {**named(head, without=("embed",)), **maps(FEW)}, head, pickled=True)


def official_eagle3_own_size() -> Fixture:
    """Wider than its target, with an embedding of its own."""
    head = eagle3(9, hidden=32, head_dim=8)
    config = llama_config(head, draft_vocab_size=len(FEW), target_hidden_size=TARGET_HIDDEN)
    return Fixture(config, {**named(head), **maps(FEW)}, head)


def official_eagle3_whole() -> Fixture:
    """All tokens: the official code deletes both maps."""
    head = eagle3(10, tokens=None)
    config = llama_config(head, draft_vocab_size=VOCAB)
    return Fixture(config, named(head), head)


def specforge_eagle3() -> Fixture:
    """SpecForge: ids of outputs, head_dim of its own, rotary settings in both spellings, no embedding."""
    head = eagle3(11, head_dim=10, theta=900.0, rope_factor=2.0)
    head.weights["embed"] = TARGET_EMBED
    rope = {"rope_type": "linear", "factor": 2.0}
    config = llama_config(
        head,
        architectures=["LlamaForCausalLMEagle3"],
        head_dim=10,
        draft_vocab_size=len(FEW),
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
        rope_parameters={**rope, "rope_theta": 900.0},
        rope_scaling=rope,
        rope_theta=900.0,
    )
    return Fixture(config, {**named(head, without=("embed",)), **maps(FEW)}, head)


def specforge_eagle31() -> Fixture:
    """EAGLE-3.1 with the embedding, as `to_hf` writes it."""
    head = eagle3(12, tap_norms=True, norm_output=True)
    config = llama_config(
        head,
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=len(FEW),
        fc_norm=True,
        norm_output=True,
        sliding_window=None,
    )
    return Fixture(config, {**named(head), **maps(FEW)}, head)


def sglang_eagle31_aliases() -> Fixture:
    """SGLang's older names of the norms, and no draft vocabulary: lm_head is the target's."""
    head = eagle3(13, tap_norms=True, tokens=None)
    head.weights["out"] = TARGET_OUT
    config = llama_config(head, architectures=["LlamaForCausalLMEagle3"], use_aux_norm=True)
    tensors = named(head, without=("out",))
    for tap, alias in enumerate(("low", "mid", "high")):
        tensors[f"aux_norm_{alias}.weight"] = tensors.pop(f"fc_norm.{tap}.weight")
    return Fixture(config, tensors, head)


def sglang_eagle3_tied() -> Fixture:
    """The output matrix is the head's embedding."""
    head = eagle3(14, tokens=None)
    head.weights["out"] = head.weights["embed"]
    config = llama_config(head, architectures=["LlamaForCausalLMEagle3"], tie_word_embeddings=True)
    return Fixture(config, named(head, without=("out",)), head)


def sglang_eagle3_deep() -> Fixture:
    """Two layers, the second with what SGLang calls `hidden_norm`; fc with a bias; four layers read."""
    head = eagle3(15, layers=2, taps=(2, 3, 5, 8))
    head.weights["fc_bias"] = random_weight(torch.Generator().manual_seed(1), 1, TARGET_HIDDEN)[0]
    tensors = {**named(head, "layers.0."), **maps(FEW)}
    tensors["layers.1.hidden_norm.weight"] = tensors.pop("layers.1.input_layernorm.weight")
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4, 7]}
    config = llama_config(
        head, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=len(FEW), eagle_config=ids, bias=True
    )
    return Fixture(config, tensors, head, facts={"other taps": (1, 2, 4, 7)})


def vllm_eagle3() -> Fixture:
    """Names of vLLM, two layers, ids of inputs beside the other keys, up to what leaves the last layer."""
    head = eagle3(16, layers=2, taps=(1, 8), norm_before_residual=True)
    config = llama_config(
        head,
        architectures=["Eagle3LlamaForCausalLM"],
        draft_vocab_size=len(FEW),
        eagle_aux_hidden_state_layer_ids=[1, 8],
        norm_before_residual=True,
    )
    return Fixture(config, {**named(head, "layers.0.", prefix="model."), **maps(FEW)}, head)


def speculators_eagle3() -> Fixture:
    """All of speculators' switches on, and a setting that would let wrong tokens pass."""
    switches: dict[str, Any] = {"norm_before_residual": True, "norm_output": True}
    head = eagle3(17, taps=(3, 4, 8), tap_norms=True, wide_norm=True, theta=1000.0, **switches)
    config = speculators_config(
        head,
        "eagle3",
        layer={"rope_theta": 1000.0},
        proposal={"accept_tolerance": 0.1},
        draft_vocab_size=len(FEW),
        target_hidden_size=None,
        eagle_aux_hidden_state_layer_ids=[3, 4, 8],
        embed_requires_grad=True,
        norm_before_fc=True,
        fc_norm=True,
        **switches,
    )
    return Fixture(config, {**named(head, "layers.0."), **maps(FEW)}, head, facts={"verifier": "org/target"})


def speculators_eagle3_qwen3() -> Fixture:
    """Qwen3 layers within a window; norm_before_residual is left to the default; two layers."""
    extra = {**qkv_biases(10), "o_bias": TARGET_HIDDEN, "qn": 10, "kn": 10}
    head = eagle3(18, head_dim=10, layers=2, extra=extra, norm_before_residual=True, window=12)
    layer = {"model_type": "qwen3", "attention_bias": True, "sliding_window": 12, "use_sliding_window": True}
    layer["layer_types"] = ["sliding_attention"] * 2
    config = speculators_config(head, "eagle3", layer=layer, draft_vocab_size=len(FEW))
    return Fixture(config, {**named(head, "layers.0."), **maps(FEW)}, head)


FORMATS: dict[str, Callable[[], Fixture]] = {
    make.__name__: make
    for make in (
        official_eagle,
        official_eagle_qwen2,
        vllm_eagle_nested,
        vllm_eagle_mapped,
        vllm_eagle,
        sglang_eagle,
        speculators_eagle,
        official_eagle3,
        official_eagle3_own_size,
        official_eagle3_whole,
        specforge_eagle3,
        specforge_eagle31,
        sglang_eagle31_aliases,
        sglang_eagle3_tied,
        sglang_eagle3_deep,
        vllm_eagle3,
        speculators_eagle3,
        speculators_eagle3_qwen3,
    )
}
