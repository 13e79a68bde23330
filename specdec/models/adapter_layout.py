"""Layout of adapters in a target or a draft model: the products of its layers, their parts, and their bank."""

from collections.abc import Mapping, Sequence

from specdec.draft_heads.heads.draft_head import CachedHead, DraftModel, ModelPart
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.draft_heads.llama.llama_layer import ComposedMixer, Mixer, fused_layers
from specdec.draft_heads.llama.mlp import mlp_kind
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.types.adapters import AdaptableProduct, AdapterBank, LayerAdapter, StackedAdapters, adaptable
from specdec.kernels.types.product import Product
from specdec.models.llama import LlamaModel

# See `adapted_products`, of each layer.
AdapterLayout = Sequence[Mapping[str, AdaptableProduct]]


def adapted_products(config: LlamaConfig, inputs: int | None = None) -> dict[str, AdaptableProduct]:
    """Return the products of a layer that adapters may change, by their names in `LayerAdapter`.

    Args:
        inputs: of queries, keys and values, where they are others than the hidden state.
    """
    hidden = config.hidden_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = {f"self_attn.{name}_proj": size for name, size in (("q", heads), ("k", kv_heads), ("v", kv_heads))}
    return {
        "qkv": adaptable(inputs or hidden, qkv),
        "output": adaptable(heads, {"self_attn.o_proj": hidden}),
        **mlp_kind(config).products(config),
    }


def target_layout(config: LlamaConfig) -> AdapterLayout:
    """Return the products of a whole target."""
    return [adapted_products(config)] * config.num_layers


def target_part(model: LlamaModel, adapter: Sequence[LayerAdapter]) -> Sequence[LayerAdapter]:
    """Return what this rank has of an adapter of the whole target: its layers, split as the weights beside them."""
    return adapter if model.shard is None else _part_of(adapter, target_layout(model.shard.whole), model.shard)


def _part_of(adapter: Sequence[LayerAdapter], layout: AdapterLayout, shard: ModelPart) -> Sequence[LayerAdapter]:
    """Return a rank's part of an adapter of a whole model."""
    return [
        {
            name: [
                shard.cut_low_rank(f"layers.{layer}.{part.module}", low)
                for part, low in zip(product.parts, adapter[layer][name], strict=True)
            ]
            for name, product in layout[layer].items()
        }
        for layer in shard.layer_range
    ]


def draft_layout(draft: DraftModel) -> AdapterLayout:
    """Return the products of a whole draft model's layers."""
    config = draft.head.llama if draft.part is None else draft.part.whole
    return [adapted_products(config, mixer.input_size) for mixer in draft.head.mixers]


def draft_part(draft: DraftModel, adapter: Sequence[LayerAdapter]) -> Sequence[LayerAdapter]:
    """Return what this rank has of an adapter of a draft model's layers, as its bank takes it.

    Keys and values of `CachedHead.beside` come behind the layers.
    """
    head = draft.head
    if draft.part is not None:
        adapter = _part_of(adapter, draft_layout(draft), draft.part)
    return [*adapter, {"qkv": [low for layer in adapter for low in layer["qkv"][1:]]}] if head.beside else adapter


def attach_draft_adapters(head: CachedHead, kernels: KernelSet, places: int, rank: int) -> AdapterBank:
    """Have a draft model carry adapters, and return their bank, which is empty; see `attach_adapters`."""
    layout = [adapted_products(head.llama, mixer.input_size) for mixer in head.mixers]
    if head.beside:
        parts = tuple(part for products in layout for part in products["qkv"].parts[1:])
        layout.append({"qkv": AdaptableProduct(head.llama.hidden_size, parts)})
    return _bank(head.mixers, head.beside, layout, kernels, places, rank)


def attach_adapters(model: LlamaModel, kernels: KernelSet, places: int, rank: int) -> AdapterBank:
    """Have the layers of a target carry adapters, and return their bank, which is empty.

    Args:
        places: most adapters.
        rank: their largest rank.
    """
    layout = [adapted_products(model.config)] * len(model.layers)
    model.adapters = _bank(model.mixers, {}, layout, kernels, places, rank)
    return model.adapters


def _bank(
    mixers: Sequence[Mixer],
    beside: dict[str, Product],
    layout: AdapterLayout,
    kernels: KernelSet,
    places: int,
    rank: int,
) -> AdapterBank:
    """Return the bank of the adapters of layers, and of products beside them."""
    if kernels.passes is not None and (fused := fused_layers(mixers)) is not None:
        return kernels.passes.adapters(fused, beside.get("qkv"))
    bank = StackedAdapters(kernels.grouped_lora, places, rank)
    composed = [mixer for mixer in mixers if isinstance(mixer, ComposedMixer)]
    carriers, like = [(mixer.products, mixer.mlp.products) for mixer in composed], composed[0].post_norm.weight
    for carried, own_layout in zip([*carriers, *([(beside,)] if beside else [])], layout, strict=True):
        own = {name: product for products in carried for name, product in products.items()}
        adapted = bank.adapt({name: (own[name], own_layout[name].sizes) for name in own_layout}, like)
        for products in carried:
            products.update({name: adapted[name] for name in products if name in adapted})
    return bank
