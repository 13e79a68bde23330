"""A head's config.json: its settings in whichever nesting, and the layer settings of the official one."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from specdec.draft_heads.formats.head_tensors import HeadTensors
from specdec.draft_heads.llama.checkpoint_files import items, section
from specdec.draft_heads.llama.llama_config import LlamaConfig, positive


class Layout(StrEnum):
    """Program whose conventions a config.json follows; which program wrote it cannot be told."""

    OFFICIAL = "official EAGLE"
    SGLANG = "SGLang"
    SPECFORGE = "SpecForge and SGLang"
    SPECULATORS = "speculators"
    VLLM = "vLLM"
    DFLASH = "z-lab and SpecForge"
    DEEPSPEC = "DeepSpec"


@dataclass(frozen=True)
class HeadSettings:
    """Settings in a head's config.json.

    Attributes:
        layout: program whose conventions it follows.
        own: keys about the head.
        layer: keys about the decoder layers, those of a Llama's config.json.
        verifier: name or path of the target that the head was trained for; None if config.json names none.
    """

    layout: Layout
    own: Mapping[str, Any]
    layer: Mapping[str, Any]
    verifier: str | None = None

    @property
    def training(self) -> Mapping[str, Any]:
        """Facts about the training that `specdec train` or `specdec export` wrote; empty without them."""
        value = self.own.get("training")
        return value if isinstance(value, Mapping) else {}

    @classmethod
    def from_json(cls, settings: Mapping[str, Any]) -> "HeadSettings":
        """Find the settings in their nesting.

        Raises:
            CheckpointError: a nested part that is no object.
        """
        if "speculators_model_type" in settings or "speculators_config" in settings:
            verifier = section(section(settings, "speculators_config"), "verifier").get("name_or_path")
            layer = section(settings, "transformer_layer_config")
            return cls(Layout.SPECULATORS, settings, layer, str(verifier) if verifier else None)
        if isinstance(settings.get("model"), Mapping):
            # vLLM lets the outer keys win.
            outer = {key: value for key, value in settings.items() if key not in ("model", "model_type")}
            layer = {**section(settings, "model"), **outer}
            return cls(Layout.VLLM, layer, layer)
        return cls(_plain_layout(settings), settings, settings)

    def llama(self, tensors: HeadTensors) -> tuple[LlamaConfig, list[str]]:
        """Return the decoder layers, and the assumptions about them. What the tensors show overrides config.json.

        Raises:
            CheckpointError: a setting that is missing or not honoured.
        """
        layer, assumptions = dict(self.layer), []
        if layer.get("num_hidden_layers") is None:
            layer["num_hidden_layers"] = max(1, tensors.num_layers)
            assumptions.append(f"config.json does not count its layers: the file has {layer['num_hidden_layers']}")
        said = layer["num_hidden_layers"]
        if type(said) is int and said > 1 and tensors.num_layers == 1 and tensors.spells("midlayer."):
            # EAGLE-3's own program has one layer, by this name, whatever a config.json copied from the target says.
            layer["num_hidden_layers"] = 1
            assumptions.append(f"config.json says num_hidden_layers {said}: one, as the file has midlayer alone")
        kinds, is_windowed = items(layer, "layer_types"), layer.get("use_sliding_window", True) is not False
        window = layer.get("sliding_window") if is_windowed else None
        layer["sliding_window"] = None
        layer["layer_types"] = [kind for kind in kinds if kind != "sliding_attention"]
        config = LlamaConfig.from_json(layer)
        # One layer too many is enough to tell that layers are missing, and no number is too large.
        config = replace(config, num_layers=min(config.num_layers, tensors.num_layers + 1))
        if window is not None:
            window, layers = positive(self.layer, "sliding_window"), range(config.num_layers)
            sliding = [not kinds or kinds[layer : layer + 1] == ["sliding_attention"] for layer in layers]
            config = replace(config, windows=tuple(window * one for one in sliding) if any(sliding) else ())
        nested = section(layer, "rope_scaling") or section(layer, "rope_parameters")
        if not layer.get("rope_theta") and not nested.get("rope_theta"):
            assumptions.append(f"config.json has no rope_theta: {config.rope.theta:g}")
        promised = bool(self.own.get("qkv_bias") or layer.get("attention_bias"))
        # In other layouts heads of a Qwen3 mostly have Llama layers.
        norms_promised = self.layout == Layout.SPECULATORS and config.qk_norm
        return replace(
            config,
            attention_bias=promised or any(tensors.has(f"self_attn.{name}_proj.bias") for name in "qkv"),
            output_bias=tensors.has("self_attn.o_proj.bias"),
            mlp_bias=config.mlp_bias or tensors.has("mlp.down_proj.bias"),
            qk_norm=norms_promised or any(tensors.has(f"self_attn.{name}_norm.weight") for name in "qk"),
            tie_word_embeddings=False,
        ), assumptions


def _plain_layout(settings: Mapping[str, Any]) -> Layout:
    names = [str(name) for name in items(settings, "architectures")]
    if "dflash_config" in settings:
        return Layout.DFLASH
    if "target_layer_ids" in settings or any(name.endswith("DSparkModel") for name in names):
        return Layout.DEEPSPEC
    if any(name.endswith("ForCausalLMEagle3") for name in names) or "eagle_config" in settings:
        return Layout.SPECFORGE
    if any(name.endswith("ForCausalLMEagle") for name in names):
        return Layout.SGLANG
    if any(name.startswith("Eagle") for name in names) or settings.get("model_type") == "eagle":
        return Layout.VLLM
    return Layout.OFFICIAL


def layer_settings(llama: LlamaConfig) -> dict[str, Any]:
    """Return what an official config.json says about decoder layers.

    Raises:
        ValueError: it cannot express the rope type.
    """
    rope, windows = llama.rope, llama.layer_windows
    if rope.rope_type != "default":
        raise ValueError(f"a head with rope type {rope.rope_type!r} cannot be saved; train it with the default one")
    sliding: dict[str, Any] = {}
    if any(windows):
        kinds = ["sliding_attention" if window else "full_attention" for window in windows]
        sliding = {"sliding_window": max(windows), "use_sliding_window": True, "layer_types": kinds}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": llama.hidden_size,
        "intermediate_size": llama.intermediate_size,
        "num_attention_heads": llama.num_heads,
        "num_key_value_heads": llama.num_kv_heads,
        "head_dim": llama.head_dim,
        "num_hidden_layers": llama.num_layers,
        "vocab_size": llama.vocab_size,
        "rms_norm_eps": llama.rms_norm_eps,
        "max_position_embeddings": llama.max_position,
        "hidden_act": "silu",
        "rope_theta": rope.theta,
        **sliding,
    }
