"""EAGLE-3 and 3.1 heads in files: the official layout, SpecForge's and SGLang's, vLLM's, and speculators'."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec.draft_heads.formats.draft_vocab import draft_tokens, vocabulary_maps
from specdec.draft_heads.formats.head_kind import HeadDescription, HeadKind, LoadedHead, Source, expected_shapes, filled
from specdec.draft_heads.formats.head_settings import HeadSettings, Layout, layer_settings
from specdec.draft_heads.formats.head_tensors import EMBEDDING, OUTPUT, HeadTensors
from specdec.draft_heads.formats.tap_ids import KEY, TapIds, tap_ids
from specdec.draft_heads.heads.draft_head import DraftModel, TargetParts
from specdec.draft_heads.heads.eagle3 import Eagle3Config, Eagle3Head
from specdec.draft_heads.heads.readout import MatrixReadout
from specdec.draft_heads.llama.checkpoint_files import CheckpointError, flag, items, section
from specdec.draft_heads.llama.llama_config import positive
from specdec.kernels.kernel_set import KernelSet

# Switches of config.json that plain EAGLE-3 does not have.
VARIANTS = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
# Settings of speculators' proposals; other values would accept tokens that are not the target's.
EXACT_VALUES = {"verifier_accept_k": (1, None), "accept_tolerance": (0, None)}


class Eagle3Kind(HeadKind[Eagle3Config, Eagle3Head]):
    """EAGLE-3, and EAGLE-3.1, which adds norms to it."""

    name = "eagle3"
    label = "EAGLE-3"
    sign = "hidden_norm.weight"
    id_maps = ("d2t", "t2d")

    def recognises(self, settings: HeadSettings, tensors: HeadTensors) -> bool:  # noqa: ARG002
        """Return whether attention takes embedding and state side by side."""
        if tensors.has(self.sign) or tensors.spells("midlayer."):
            return True
        query, fc = (tensors.by_name.get(name) for name in ("layers.0.self_attn.q_proj.weight", "fc.weight"))
        if query is None or fc is None or query.ndim != 2 or fc.ndim != 2:
            return False
        return query.shape[1] == 2 * fc.shape[0]

    def describe(self, settings: HeadSettings, tensors: HeadTensors) -> HeadDescription[Eagle3Config]:
        own = settings.own
        llama, assumptions = settings.llama(tensors)
        taps = tap_ids(settings)
        target_hidden = positive(own, "target_hidden_size", llama.hidden_size)
        # The target's matrices fit if the sizes are alike.
        is_alike = target_hidden == llama.hidden_size
        shares = is_alike and EMBEDDING not in tensors and not flag(own, "embed_requires_grad")
        embedding = Source.TARGET if shares else Source.FILE
        d2t, t2d = tensors.by_name.get("d2t"), tensors.by_name.get("t2d")
        draft_vocab = positive(own, "draft_vocab_size", llama.vocab_size if d2t is None else d2t.numel())
        output = _output(settings, tensors, draft_vocab == llama.vocab_size, is_alike)
        config = Eagle3Config(
            llama=llama,
            taps=(-1,) * _num_taps(taps, tensors, target_hidden),
            target_hidden_size=target_hidden,
            draft_vocab_size=draft_vocab,
            fc_bias="fc.bias" in tensors,
            norm_before_fc=flag(own, "norm_before_fc") or "input_norm.weight" in tensors,
            fc_norm=flag(own, "fc_norm") or flag(own, "use_aux_norm") or "fc_norm.0.weight" in tensors,
            norm_before_residual=flag(own, "norm_before_residual", settings.layout == Layout.SPECULATORS),
            norm_output=flag(own, "norm_output"),
        )
        # SGLang calls the input norm of layers after the first `hidden_norm`.
        for layer in range(1, llama.num_layers):
            old, new = f"layers.{layer}.hidden_norm.weight", f"layers.{layer}.input_layernorm.weight"
            if old in tensors and new not in tensors:
                tensors.by_name[new], tensors.spellings[new] = tensors.by_name.pop(old), tensors.spellings.pop(old)
        expected = expected_shapes(lambda: _official_names(Eagle3Head(config)))
        if embedding == Source.TARGET:
            del expected[EMBEDDING]
        if output != Source.FILE:
            del expected[OUTPUT]
        return HeadDescription(
            kind=self,
            label="EAGLE-3.1" if config.fc_norm or config.norm_output else self.label,
            settings=settings,
            config=config,
            tensors=tensors,
            expected=expected,
            embedding=embedding,
            output=output,
            reads=target_hidden,
            tokens=draft_tokens(d2t, t2d, draft_vocab, llama.vocab_size),
            id_maps=self.id_maps,
            taps=taps,
            variants=("fc.bias",) * config.fc_bias + tuple(name for name in VARIANTS if getattr(config, name)),
            assumptions=(*assumptions, *_settled(settings, tensors, config, embedding, output)),
        )

    def build(self, description: HeadDescription[Eagle3Config], target: TargetParts, kernels: KernelSet) -> LoadedHead:
        assert description.taps is not None
        taps = description.taps.of(target.config.num_layers)
        config = replace(description.config, taps=taps.layers)
        named, lent = dict(description.tensors.by_name), description.lent(target)
        match description.output:
            case Source.TARGET:
                lent[OUTPUT] = target.output.weight
            case Source.EMBEDDING:
                (lent if EMBEDDING in lent else named)[OUTPUT] = {**named, **lent}[EMBEDDING]
        if config.fc_norm:
            named["fc_norm.weight"] = torch.stack([named[f"fc_norm.{tap}.weight"] for tap in range(len(config.taps))])
        head = filled(partial(Eagle3Head, config), named, lent, target)
        form = head.form(kernels)
        tokens = description.tokens
        head.draft_tokens.copy_(torch.arange(config.draft_vocab_size) if tokens is None else tokens)
        matrix = None if description.output == Source.TARGET else head.lm_head.weight
        output = kernels.draft_output(matrix, target.output)
        readout = MatrixReadout(output, config.llama.vocab_size, None if tokens is None else head.draft_tokens)
        other = DraftModel(form.reading(taps.others), readout) if taps.others else None
        return LoadedHead(DraftModel(form, readout), description, other)

    def check_official(self, description: HeadDescription[Eagle3Config]) -> None:
        is_alike = description.config.llama.hidden_size == description.reads
        if description.output != Source.FILE:
            raise CheckpointError("it has no output matrix; the official layout of EAGLE-3 asks for one")
        if description.embedding == Source.FILE and is_alike:
            raise CheckpointError("it has an embedding of its own; the official layout of EAGLE-3 takes the target's")

    def official(self, head: Eagle3Head) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return config.json and tensors in the official layout.

        It leaves out the embedding where it has the target's size, and the maps of a whole vocabulary. Variants have
        the names that vLLM and SGLang use. The layers read are given in both countings, which settles them for
        `TapIds`; vLLM reads the first, SGLang the second.
        """
        own, llama = head.config, head.config.llama
        config = {
            **layer_settings(llama),
            "draft_vocab_size": own.draft_vocab_size,
            "attention_bias": llama.attention_bias,
            KEY: list(own.taps),
            "eagle_config": {KEY: [tap - 1 for tap in own.taps], "use_aux_hidden_state": True},
            **{key: True for key in VARIANTS if getattr(own, key)},
        }
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in _official_names(head).items()}
        if llama.hidden_size == own.target_hidden_size:
            del tensors[EMBEDDING]
        else:
            config["target_hidden_size"] = own.target_hidden_size
        if own.draft_vocab_size != llama.vocab_size:
            tensors |= vocabulary_maps(head.draft_tokens.cpu(), llama.vocab_size)
        return config, tensors


def _num_taps(taps: TapIds, tensors: HeadTensors, target_hidden: int) -> int:
    """Return how many layers fc reads.

    Raises:
        CheckpointError: config.json names another number of layers.
    """
    named = 3 if taps.ids is None else len(taps.ids)
    fc = tensors.by_name.get("fc.weight")
    if fc is None or fc.ndim != 2 or fc.shape[1] % target_hidden:
        return named
    read = fc.shape[1] // target_hidden
    # The check of shapes reports a transposed matrix.
    if read == named or fc.shape[0] == named * target_hidden:
        return named
    reads = f"fc.weight reads {read} states of size {target_hidden}"
    if taps.ids is None:
        raise CheckpointError(f"{reads}; config.json must say of which layers, by {KEY}")
    raise CheckpointError(f"{reads}; {KEY} = {list(taps.ids)} names {named} layers")


def _output(settings: HeadSettings, tensors: HeadTensors, is_whole: bool, is_alike: bool) -> Source:
    """Return the origin of the output matrix.

    Args:
        is_whole: whether the head proposes all of the target's tokens. Otherwise only the file can have its matrix.
    """
    if OUTPUT in tensors or settings.layout == Layout.SPECULATORS or not is_whole:
        return Source.FILE
    if settings.own.get("tie_word_embeddings"):
        return Source.EMBEDDING
    # As in SGLang and vLLM.
    return Source.TARGET if is_alike else Source.FILE


def _settled(
    settings: HeadSettings, tensors: HeadTensors, config: Eagle3Config, embedding: Source, output: Source
) -> list[str]:
    """Return how gaps, and differences between config.json and tensors or between two programs, were settled."""
    own, layout = settings.own, settings.layout
    norm = tensors.spelling("layers.1.input_layernorm.weight")
    proposals = items(section(own, "speculators_config"), "proposal_methods")
    methods = [one for one in proposals if isinstance(one, Mapping)]
    lossy = [f"{key} {one[key]}" for one in methods for key in EXACT_VALUES if one.get(key) not in EXACT_VALUES[key]]
    cases = {
        "the file has no embedding: the target's": embedding == Source.TARGET,
        f"the file has no output matrix: {output}": output != Source.FILE,
        f"config.json has no draft_vocab_size: the {config.draft_vocab_size} tokens of d2t": (
            "d2t" in tensors and own.get("draft_vocab_size") is None
        ),
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


def _official_names(head: Eagle3Head) -> dict[str, Tensor]:
    """Return a head's parameters under the names of the official layout, but for the first layer, `layers.0` here."""
    named = head.split_parameters()
    norms = named.pop("fc_norm.weight", None)
    if norms is not None:
        named |= {f"fc_norm.{tap}.weight": weight for tap, weight in enumerate(norms)}
    return named
