"""Tiny random draft heads in plain words, and how files call their parts; `head_formats` makes files of them.

Nothing here uses the package.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

# The target.
VOCAB, TARGET_HIDDEN, TARGET_LAYERS = 53, 24, 8
INTERMEDIATE, HEADS, KV_HEADS = 28, 4, 2
FEW = [0, 3, 4, 9, 10, 11, 17, 26, 31, 40, 41, 52]


@dataclass
class Head:
    """A head in plain words, of which files are written and which `dense_head` computes.

    Attributes:
        eagle3: else it is of EAGLE-1/2.
        weights: float16 values. `embed`, `fc`, `fc_bias`, `out`, norms `last`, `wide`, `tap0` and so on, and of each
            layer `0.q`, `0.k`, `0.v`, `0.o`, `0.gate`, `0.up`, `0.down`, norms `0.post`, `0.in`, `0.hidden`, `0.qn` and
            `0.kn`, and biases such as `0.q_bias`.
        taps: indices of transformers' `hidden_states` that it reads.
        tokens: which ones it scores, in the order of `out`; None for all.
        window: tokens that a row sees, itself included; 0 for all.
    """

    eagle3: bool
    weights: dict[str, Tensor]
    hidden: int = TARGET_HIDDEN
    head_dim: int = 6
    layers: int = 1
    theta: float = 10000.0
    rope_factor: float = 1.0
    eps: float = 1e-5
    taps: tuple[int, ...] = ()
    tokens: list[int] | None = None
    norm_before_residual: bool = False
    norm_output: bool = False
    window: int = 0


@dataclass
class Fixture:
    """A format as it lies on disk.

    Attributes:
        config: config.json.
        tensors: the file's, by its names.
        head: what they are.
        pickled: written as `pytorch_model.bin`.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    head: Head
    pickled: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.pickled:
            torch.save(self.tensors, folder / "pytorch_model.bin")
        else:
            save_file({name: t.contiguous() for name, t in self.tensors.items()}, folder / "model.safetensors")
        return folder


def random_weight(generator: torch.Generator, *shape: int) -> Tensor:
    values = torch.randn(*shape, generator=generator) * (0.4 if len(shape) > 1 else 0.2)
    return (values + (1.0 if len(shape) == 1 else 0.0)).half()


# What of the target heads use.
TARGET_EMBED, TARGET_OUT = (
    random_weight(torch.Generator().manual_seed(seed), VOCAB, TARGET_HIDDEN) for seed in (91, 92)
)


def _layer(layer: int, hidden: int, dim: int, width: int, extra: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "q": (HEADS * dim, width),
        "k": (KV_HEADS * dim, width),
        "v": (KV_HEADS * dim, width),
        "o": (hidden, HEADS * dim),
        "gate": (INTERMEDIATE, hidden),
        "up": (INTERMEDIATE, hidden),
        "down": (hidden, INTERMEDIATE),
        "post": (hidden,),
        **{name: (size,) for name, size in extra.items()},
    }
    return {f"{layer}.{name}": shape for name, shape in shapes.items()}


def qkv_biases(dim: int = 6) -> dict[str, int]:
    return {"q_bias": HEADS * dim, "k_bias": KV_HEADS * dim, "v_bias": KV_HEADS * dim}


def _fill(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: random_weight(generator, *shape) for name, shape in shapes.items()}


def eagle(seed: int, fc_bias: bool = False, extra: Mapping[str, int] | None = None, **settings: Any) -> Head:
    """A head of EAGLE-1/2."""
    shapes = {"embed": (VOCAB, TARGET_HIDDEN), "fc": (TARGET_HIDDEN, 2 * TARGET_HIDDEN)}
    shapes |= _layer(0, TARGET_HIDDEN, 6, TARGET_HIDDEN, extra or {})
    weights = _fill({**shapes, **({"fc_bias": (TARGET_HIDDEN,)} if fc_bias else {})}, seed)
    return Head(False, {**weights, "out": TARGET_OUT}, **settings)


def eagle3(
    seed: int,
    *,
    hidden: int = TARGET_HIDDEN,
    head_dim: int = 6,
    layers: int = 1,
    taps: tuple[int, ...] = (2, 4, 5),
    tokens: list[int] | None = FEW,
    extra: Mapping[str, int] | None = None,
    tap_norms: bool = False,
    wide_norm: bool = False,
    **settings: Any,
) -> Head:
    """A head of EAGLE-3; its default taps are the official ones of a target of 8 layers."""
    wide = len(taps) * TARGET_HIDDEN
    shapes: dict[str, tuple[int, ...]] = {"embed": (VOCAB, hidden), "fc": (hidden, wide), "last": (hidden,)}
    shapes["out"] = (VOCAB if tokens is None else len(tokens), hidden)
    shapes |= {f"tap{i}": (TARGET_HIDDEN,) for i in range(len(taps) if tap_norms else 0)}
    shapes |= {"wide": (wide,)} if wide_norm else {}
    for layer in range(layers):
        norms = {"in": hidden, "hidden": hidden} if layer == 0 else {"in": hidden}
        shapes |= _layer(layer, hidden, head_dim, 2 * hidden if layer == 0 else hidden, {**(extra or {}), **norms})
    names = {"hidden": hidden, "head_dim": head_dim, "layers": layers, "taps": taps, "tokens": tokens}
    return Head(True, _fill(shapes, seed), **names, **settings)


FILE_NAMES = {
    "embed": "embed_tokens.weight",
    "fc": "fc.weight",
    "fc_bias": "fc.bias",
    "out": "lm_head.weight",
    "last": "norm.weight",
    "wide": "input_norm.weight",
}
LAYER_NAMES = {
    **{name: f"self_attn.{name}_proj.weight" for name in "qkvo"},
    **{f"{name}_bias": f"self_attn.{name}_proj.bias" for name in "qkvo"},
    **{name: f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    **{f"{name}n": f"self_attn.{name}_norm.weight" for name in "qk"},
    "post": "post_attention_layernorm.weight",
    "in": "input_layernorm.weight",
    "hidden": "hidden_norm.weight",
}


def named(head: Head, first: str = "midlayer.", without: tuple[str, ...] = (), prefix: str = "") -> dict[str, Tensor]:
    """A head's tensors as files call them.

    Args:
        first: what the first layer is called.
        without: plain names that this file lacks.
        prefix: in front of all but lm_head.
    """
    tensors = {}
    for name, tensor in head.weights.items():
        if name in without:
            continue
        layer, _, part = name.partition(".")
        if part:
            spelled = (first if layer == "0" else f"layers.{layer}.") + LAYER_NAMES[part]
        elif name.startswith("tap"):
            spelled = f"fc_norm.{name[3:]}.weight"
        else:
            spelled = FILE_NAMES[name]
        tensors[spelled if spelled.startswith("lm_head") else prefix + spelled] = tensor
    return tensors


def maps(tokens: list[int]) -> dict[str, Tensor]:
    """`d2t`: target id minus draft id. `t2d`: which of the target's ids have one."""
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[tokens] = True
    return {"d2t": torch.tensor(tokens) - torch.arange(len(tokens)), "t2d": known}


def llama_config(head: Head, **more: Any) -> dict[str, Any]:
    """Keys of a Llama's config.json, as far as official heads have them; None takes one out."""
    config = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": head.hidden,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": head.layers,
        "max_position_embeddings": 64,
        "rms_norm_eps": head.eps,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        **more,
    }
    return {key: value for key, value in config.items() if value is not None}


def speculators_config(head: Head, kind: str, **more: Any) -> dict[str, Any]:
    """The nesting of speculators; `layer` holds what the layers' part says besides."""
    layer = more.pop("layer", {})
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": [f"{kind.title()}Speculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, **more.pop("proposal", {})}],
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": llama_config(head, head_dim=head.head_dim, **layer),
        **more,
    }
