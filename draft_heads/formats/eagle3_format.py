"""EAGLE-3 and 3.1 heads in files: the official layout, SpecForge's and SGLang's, vLLM's, and speculators'."""

from collections.abc import Mapping

import torch
from torch import Tensor

from specdec.draft_heads.formats.draft_vocab import draft_tokens
from specdec.draft_heads.formats.head_description import HeadDescription, Source
from specdec.draft_heads.formats.head_settings import HeadSettings, Layout, section
from specdec.draft_heads.formats.head_tensors import HeadTensors
from specdec.draft_heads.formats.tap_ids import KEY, Counting, TapIds
from specdec.draft_heads.heads.eagle3 import Eagle3Config, Eagle3Head
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.draft_heads.llama.llama_layer import fuse_layer, split_layer

MAPS = ("d2t", "t2d")
# Of speculators' proposals; other values would accept tokens that are not the target's.
EXACT_VALUES = {"verifier_accept_k": (1, None), "accept_tolerance": (0, None)}


def describe_eagle3(settings: HeadSettings, tensors: HeadTensors) -> HeadDescription:
    """Recognise an EAGLE-3 head.

    Raises:
        CheckpointError: a setting that is not honoured, or tensors that are not what the settings ask for.
    """
    own = settings.own
    llama, assumptions = settings.llama(tensors)
    taps = _tap_ids(settings)
    target_hidden = settings.size("target_hidden_size", llama.hidden_size)
    # A matrix of the target's fits where the sizes are alike.
    is_alike = target_hidden == llama.hidden_size
    shares = is_alike and "embed_tokens.weight" not in tensors and not own.get("embed_requires_grad")
    embedding = Source.TARGET if shares else Source.FILE
    output = _output(settings, tensors, llama.vocab_size, is_alike)
    draft_vocab = settings.size("draft_vocab_size", llama.vocab_size)
    config = Eagle3Config(
        llama=llama,
        taps=(-1,) * _num_taps(taps, tensors, target_hidden),
        target_hidden_size=target_hidden,
        draft_vocab_size=draft_vocab,
        fc_bias="fc.bias" in tensors,
        norm_before_fc=bool(own.get("norm_before_fc")) or "input_norm.weight" in tensors,
        fc_norm=bool(own.get("fc_norm") or own.get("use_aux_norm")) or "fc_norm.0.weight" in tensors,
        norm_before_residual=_norm_before_residual(settings),
        norm_output=bool(own.get("norm_output")),
    )
    _name_later_norms(tensors, llama.num_layers)
    found = tensors.by_name
    tokens = draft_tokens(found.get("d2t"), found.get("t2d"), draft_vocab, llama.vocab_size)
    return HeadDescription(
        kind="EAGLE-3.1" if config.fc_norm or config.norm_output else "EAGLE-3",
        layout=settings.layout,
        config=config,
        tensors=tensors,
        expected=_expected(config, embedding, output),
        embedding=embedding,
        output=output,
        tokens=tokens if draft_vocab != llama.vocab_size else None,
        taps=taps,
        verifier=settings.verifier,
        assumptions=(*assumptions, *_sources(embedding, output), *_differences(settings, tensors, config, output)),
    )


def _tap_ids(settings: HeadSettings) -> TapIds:
    """Ids from wherever they stand."""
    outer, inner = settings.own.get(KEY), section(settings.own, "eagle_config").get(KEY)
    lists = [_ids(value) for value in (outer, inner) if value is not None]
    if not lists:
        return TapIds(None)
    if len(lists) == 2 and lists[0] != lists[1]:
        if [tap - 1 for tap in lists[0]] != list(lists[1]):
            raise CheckpointError(f"config.json has two {KEY}, {list(lists[0])} and in eagle_config {list(lists[1])}")
        return TapIds(lists[0], settled_by="config.json, by giving inputs and outputs,")
    ids = lists[0]
    if settings.layout == Layout.SPECULATORS:
        return TapIds(ids, settled_by="speculators")
    # Lists that begin with 1 are mostly SpecForge's, and with 2 mostly the official code's.
    outputs = ids[0] == 1 if ids[0] in (1, 2) else outer is None
    return TapIds(ids, Counting.OUTPUTS if outputs else Counting.INPUTS)


def _ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(tap) is int for tap in value):
        raise CheckpointError(f"{KEY} = {value!r} must be a list of layers")
    if len(set(value)) < len(value):
        raise CheckpointError(f"{KEY} = {value} names a layer twice")
    return tuple(value)


def _num_taps(taps: TapIds, tensors: HeadTensors, target_hidden: int) -> int:
    """How many layers fc reads; as many as are named."""
    named = 3 if taps.ids is None else len(taps.ids)
    fc = tensors.by_name.get("fc.weight")
    if fc is None or fc.ndim != 2 or fc.shape[1] % target_hidden:
        return named
    read = fc.shape[1] // target_hidden
    # A matrix that lies on its side is for the check of shapes to tell.
    if read == named or fc.shape[0] == named * target_hidden:
        return named
    reads = f"fc.weight reads {read} states of size {target_hidden}"
    if taps.ids is None:
        raise CheckpointError(f"{reads}; config.json must say of which layers, by {KEY}")
    raise CheckpointError(f"{reads}; {KEY} = {list(taps.ids)} names {named} layers")


def _output(settings: HeadSettings, tensors: HeadTensors, vocab_size: int, is_alike: bool) -> Source:
    """Official heads have an output matrix; the formats that may lack one say so by keys."""
    if "lm_head.weight" in tensors or settings.layout == Layout.SPECULATORS:
        return Source.FILE
    draft_vocab = settings.own.get("draft_vocab_size")
    if settings.own.get("tie_word_embeddings") and draft_vocab in (None, vocab_size):
        return Source.EMBEDDING
    # SGLang and vLLM take the target's where there is neither a matrix nor a draft vocabulary.
    return Source.TARGET if draft_vocab is None and is_alike else Source.FILE


def _norm_before_residual(settings: HeadSettings) -> bool:
    said = settings.own.get("norm_before_residual")
    return settings.layout == Layout.SPECULATORS if said is None else bool(said)


def _name_later_norms(tensors: HeadTensors, num_layers: int) -> None:
    """SGLang's layers after the first have their input normed by what it calls `hidden_norm`."""
    for layer in range(1, num_layers):
        old, new = f"layers.{layer}.hidden_norm.weight", f"layers.{layer}.input_layernorm.weight"
        if old in tensors and new not in tensors:
            tensors.rename(old, new)


def _sources(embedding: Source, output: Source) -> list[str]:
    said = ["the file has no embedding: the target's"] if embedding == Source.TARGET else []
    return said + ([f"the file has no output matrix: {output}"] if output != Source.FILE else [])


def _differences(settings: HeadSettings, tensors: HeadTensors, config: Eagle3Config, output: Source) -> list[str]:
    """Where config.json and tensors, or two programs, do not say the same."""
    own, layout = settings.own, settings.layout
    norm = tensors.spelling("layers.1.input_layernorm.weight")
    proposals = section(own, "speculators_config").get("proposal_methods") or ()
    methods = [one for one in proposals if isinstance(one, Mapping)]
    lossy = [f"{key} {one[key]}" for one in methods for key in EXACT_VALUES if one.get(key) not in EXACT_VALUES[key]]
    cases = {
        "config.json is silent about norm_before_residual: true, as vLLM takes it for speculators": (
            layout == Layout.SPECULATORS and own.get("norm_before_residual") is None
        ),
        "norm_output: it reads its own states normed, as vLLM and SGLang serve it; SpecForge trains on them unnormed": (
            layout == Layout.SPECFORGE and config.norm_output
        ),
        "config.json says bias, but the file has no bias of fc: none": own.get("bias") and not config.fc_bias,
        "config.json says tie_word_embeddings, but the file has an output matrix: that one": (
            own.get("tie_word_embeddings") and output == Source.FILE
        ),
        "the file has no t2d against which to check d2t": "d2t" in tensors and "t2d" not in tensors,
        "later layers are plain ones behind input_layernorm, as in vLLM; SGLang would look for hidden_norm": (
            config.llama.num_layers > 1 and "hidden_norm" not in norm
        ),
        f"{', '.join(lossy)} ignored: only the target's own tokens are accepted": lossy,
    }
    return [sentence for sentence, holds in cases.items() if holds]


def _expected(config: Eagle3Config, embedding: Source, output: Source) -> dict[str, list[int]]:
    with torch.device("meta"):
        named = to_official(dict(Eagle3Head(config).named_parameters()), config, "layers.0.")
    if embedding == Source.TARGET:
        del named["embed_tokens.weight"]
    if output != Source.FILE:
        del named["lm_head.weight"]
    return {name: list(tensor.shape) for name, tensor in named.items()}


def to_official(parameters: Mapping[str, Tensor], config: Eagle3Config, first: str = "midlayer.") -> dict[str, Tensor]:
    """A head's parameters under the names of the official layout.

    Args:
        first: what the first layer is called.
    """
    named: dict[str, Tensor] = {}
    for name, tensor in parameters.items():
        if name == "fc_norm.weight":
            named |= {f"fc_norm.{tap}.weight": weight for tap, weight in enumerate(tensor)}
        elif name.startswith("layers."):
            _, layer, part = name.split(".", 2)
            named[f"layers.{int(layer) + 1}.{part}"] = tensor
        else:
            named[first + name.removeprefix("first.") if name.startswith("first.") else name] = tensor
    for prefix in (first, *(f"layers.{layer}." for layer in range(1, config.llama.num_layers))):
        split_layer(named, prefix, config.llama)
    return named


def from_official(tensors: Mapping[str, Tensor], config: Eagle3Config) -> dict[str, Tensor]:
    """The inverse, of names with `layers.0`; the maps of the vocabulary are left out."""
    given = {name: tensor for name, tensor in tensors.items() if name not in MAPS}
    for layer in range(config.llama.num_layers):
        fuse_layer(given, f"layers.{layer}.")
    named: dict[str, Tensor] = {}
    for name, tensor in given.items():
        if name.startswith("layers.0."):
            named["first." + name.removeprefix("layers.0.")] = tensor
        elif name.startswith("layers."):
            _, number, part = name.split(".", 2)
            named[f"layers.{int(number) - 1}.{part}"] = tensor
        elif not name.startswith("fc_norm."):
            named[name] = tensor
    if config.fc_norm:
        named["fc_norm.weight"] = torch.stack([given[f"fc_norm.{tap}.weight"] for tap in range(len(config.taps))])
    return named
