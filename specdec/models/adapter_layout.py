"""Layout of adapters in a Llama: the products of a layer, their parts, and the bank of loaded adapters."""

from typing import NamedTuple

from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.draft_heads.llama.llama_layer import LlamaLayer
from specdec.kernels.adapters import AdapterBank, StackedAdapters
from specdec.kernels.kernel_set import KernelSet
from specdec.models.llama import LlamaModel


class AdaptedPart(NamedTuple):
    """A linear layer of the Hugging Face layout, and the rows of its weight."""

    module: str
    columns: int


class AdaptedProduct(NamedTuple):
    """A product of a layer that adapters may change.

    Attributes:
        attribute: its name in `LlamaLayer`.
        inputs: columns of its weight.
        parts: the layers of the Hugging Face layout that are joined in it.
    """

    attribute: str
    inputs: int
    parts: tuple[AdaptedPart, ...]


def adapted_products(config: LlamaConfig) -> dict[str, AdaptedProduct]:
    """Return the products of a layer by their names in `LayerWeights`."""
    hidden, width = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def parts(where: str, **columns: int) -> tuple[AdaptedPart, ...]:
        return tuple(AdaptedPart(f"{where}.{name}_proj", size) for name, size in columns.items())

    return {
        "qkv": AdaptedProduct("qkv_proj", hidden, parts("self_attn", q=heads, k=kv_heads, v=kv_heads)),
        "output": AdaptedProduct("o_proj", heads, parts("self_attn", o=hidden)),
        "gate_up": AdaptedProduct("gate_up_proj", hidden, parts("mlp", gate=width, up=width)),
        "down": AdaptedProduct("down_proj", width, parts("mlp", down=hidden)),
    }


def attach_adapters(model: LlamaModel, kernels: KernelSet, places: int, rank: int) -> AdapterBank:
    """Have the layers of a prepared model carry adapters, and return their bank, which is empty.

    Args:
        places: most adapters.
        rank: their largest rank.
    """
    layers = [layer for layer in model.layers if isinstance(layer, LlamaLayer)]
    if kernels.fused_adapters is not None:
        model.adapters = kernels.fused_adapters([layer.fused for layer in layers])
        return model.adapters
    model.adapters = bank = StackedAdapters(kernels.grouped_lora, places, rank)
    products = adapted_products(model.config)
    sizes = {name: (each.inputs, *(part.columns for part in each.parts)) for name, each in products.items()}
    for layer in layers:
        own = {name: (layer.__dict__[each.attribute], sizes[name]) for name, each in products.items()}
        for name, product in bank.adapt(own, model.norm.weight).items():
            layer.__dict__[products[name].attribute] = product
    return bank
