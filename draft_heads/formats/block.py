"""Block heads in files: DFlash, DSpark, Domino and DFlash2, as the programs write them that train such heads."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from specdec.draft_heads.formats.block_settings import CONFIDENCE, DOMINO, MARKOV, SELECTOR, BlockParts, BlockSettings
from specdec.draft_heads.formats.draft_vocab import draft_tokens, vocabulary_maps
from specdec.draft_heads.formats.head_kind import HeadDescription, HeadKind, LoadedHead, Source, expected_shapes, filled
from specdec.draft_heads.formats.head_settings import HeadSettings, layer_settings
from specdec.draft_heads.formats.head_tensors import EMBEDDING, OUTPUT, HeadTensors
from specdec.draft_heads.heads.block_head import BlockConfig, BlockHead
from specdec.draft_heads.heads.draft_head import DraftModel, TargetParts
from specdec.draft_heads.heads.edge_scorers import MARKOV_KINDS
from specdec.draft_heads.heads.readout import MatrixReadout
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.draft_heads.llama.llama_config import positive
from specdec.kernels.kernel_set import KernelSet

# A tensor that all of these heads have.
BACKBONE = "hidden_norm.weight"


class BlockKind(HeadKind[BlockConfig, BlockHead]):
    """Heads with the DFlash backbone.

    Attributes:
        parts: beginnings of the names of tensors that only heads of this kind have; none for plain DFlash, which is
            asked last.
    """

    sign = BACKBONE
    id_maps = ("d2t", "t2d")
    parts: tuple[str, ...] = ()

    def recognises(self, settings: HeadSettings, tensors: HeadTensors) -> bool:  # noqa: ARG002
        """Return whether it is a backbone with tensors of the kind."""
        return BACKBONE in tensors and (not self.parts or tensors.has_any(*self.parts))

    def describe(self, settings: HeadSettings, tensors: HeadTensors) -> HeadDescription[BlockConfig]:
        llama, assumptions = settings.llama(tensors)
        own = BlockSettings(settings, llama.num_layers)
        own.check_kind(self.name, self.label)
        output = Source.FILE if OUTPUT in tensors else Source.TARGET
        embedding = Source.FILE if EMBEDDING in tensors else Source.TARGET
        draft_vocab = positive(settings.own, "draft_vocab_size", llama.vocab_size)
        if output == Source.TARGET and draft_vocab != llama.vocab_size:
            raise CheckpointError(f"missing tensor '{OUTPUT}', which a draft vocabulary of {draft_vocab} tokens needs")
        parts = BlockParts.of(own, tensors, llama.hidden_size)
        markov = parts.markov
        anchor_first, said = own.anchor_first(has_edges=markov is not None)
        confidence = tensors.by_name.get("confidence_head.proj.weight")
        taps = own.taps()
        config = BlockConfig(
            llama=llama,
            taps=(-1,) * len(taps.ids or ()),
            block_size=own.block_size,
            mask_token=own.mask_token(llama.vocab_size),
            anchor_first=anchor_first,
            causal=own.causal(),
            draft_vocab_size=draft_vocab if output == Source.FILE else None,
            **parts._asdict(),
            confidence=confidence is not None,
            confidence_reads_token=confidence is None or confidence.shape[-1] > llama.hidden_size,
        )
        if markov is not None and markov.kind == "rnn" and not anchor_first:
            raise CheckpointError(
                "a Markov head of kind 'rnn' with sample_from_anchor false is not supported: programs differ in the "
                "state that it begins with; train it with sample_from_anchor true"
            )
        if config.num_slots < 1:
            raise CheckpointError(f"config.json: block_size = {config.block_size} leaves no position to draft")
        expected = expected_shapes(lambda: BlockHead(config).split_parameters())
        if embedding == Source.TARGET:
            del expected[EMBEDDING]
        d2t, t2d = tensors.by_name.get("d2t"), tensors.by_name.get("t2d")
        return HeadDescription(
            kind=self,
            label=self.label,
            settings=settings,
            config=config,
            tensors=tensors,
            expected=expected,
            embedding=embedding,
            output=output,
            reads=llama.hidden_size,
            tokens=draft_tokens(d2t, t2d, draft_vocab, llama.vocab_size),
            id_maps=self.id_maps,
            taps=taps,
            variants=_variants(config),
            assumptions=(*assumptions, *said),
        )

    def build(self, description: HeadDescription[BlockConfig], target: TargetParts, kernels: KernelSet) -> LoadedHead:
        assert description.taps is not None
        taps = description.taps.of(target.config.num_layers)
        config, tokens = replace(description.config, taps=taps.layers), description.tokens
        head = filled(partial(BlockHead, config), description.tensors.by_name, description.lent(target), target)
        form = head.form(kernels)
        output = kernels.draft_output(None if head.lm_head is None else head.lm_head.weight, target.output)
        if head.lm_head is not None and tokens is not None:
            head.draft_tokens.copy_(tokens)
        readout = MatrixReadout(output, config.llama.vocab_size, None if tokens is None else head.draft_tokens)
        return LoadedHead(DraftModel(form, readout), description)

    def check_official(self, description: HeadDescription[BlockConfig]) -> None:
        """Do nothing: the layouts have places for embedding and output matrix, and do without."""

    def official(self, head: BlockHead) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return config.json and tensors: z-lab's layout of DFlash, and DeepSpec's of DSpark.

        Raises:
            ValueError: as `layer_settings`, or layers of which some are causal, and not those within a window.
        """
        own = head.config
        tensors = {name.removeprefix(DOMINO): tensor for name, tensor in head.split_parameters().items()}
        # The target's, as it is frozen.
        del tensors[EMBEDDING]
        sliding = [window > 0 for window in head.llama.layer_windows]
        # The layouts take sliding layers as causal unless they are told something of all layers.
        said = {} if list(own.causal) == sliding else {"causal": all(own.causal)}
        if said and len(set(own.causal)) > 1:
            raise ValueError(
                "a head with causal and other layers cannot be saved: the layouts name sliding layers alone"
            )
        inner = {
            "target_layer_ids": [tap - 1 for tap in own.taps],
            "mask_token_id": own.mask_token,
            "sample_from_anchor": own.anchor_first,
            **said,
        }
        config = {
            **layer_settings(head.llama),
            "model_type": "qwen3" if head.llama.qk_norm else "llama",
            "attention_bias": head.llama.attention_bias,
            "block_size": own.block_size,
        }
        if own.draft_vocab_size not in (None, head.llama.vocab_size):
            config["draft_vocab_size"] = own.draft_vocab_size
            tensors |= vocabulary_maps(head.draft_tokens.cpu(), head.llama.vocab_size)
        return {**config, **self.own_settings(own, inner)}, tensors

    def speculators(self, head: BlockHead, verifier: str | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return config.json and tensors as speculators' `DFlashDraftModel` and `DSparkDraftModel` read them.

        Args:
            verifier: name or path of the target, from which speculators takes embedding and output matrix.

        Raises:
            ValueError: the head has a setting that the layout cannot express: causal layers, which it has only within
                sliding windows, layers without norms of queries and keys, or an output matrix of all tokens; or it is
                a Domino or DFlash2 head.
        """
        own, llama, tensors = head.config, head.llama, head.split_parameters()
        if own.domino or own.selector or own.convolution:
            raise ValueError("only DFlash and DSpark heads can be saved in speculators' layout")
        sliding = tuple(window > 0 for window in llama.layer_windows)
        if any(own.causal) and own.causal != sliding:
            raise ValueError(
                "a head with causal layers cannot be saved in speculators' layout, whose full layers are not"
            )
        if not llama.qk_norm:
            raise ValueError("a head without norms of queries and keys cannot be saved in speculators' layout")
        if own.draft_vocab_size == llama.vocab_size:
            raise ValueError("a head with an output matrix of all tokens cannot be saved in speculators' layout")
        del tensors[EMBEDDING]
        kind = "dspark" if own.markov or own.confidence else "dflash"
        layer = layer_settings(llama) | {"model_type": "qwen3", "attention_bias": llama.attention_bias}
        del layer["architectures"]
        config = {
            "architectures": ["DSparkSpeculator" if kind == "dspark" else "DFlashSpeculator"],
            "speculators_model_type": kind,
            "speculators_config": {
                "algorithm": kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": own.num_slots}],
                "verifier": {"name_or_path": verifier, "architectures": []},
            },
            "transformer_layer_config": layer,
            "draft_vocab_size": own.draft_vocab_size or llama.vocab_size,
            "block_size": own.block_size,
            # Ids count the inputs of layers.
            "aux_hidden_state_layer_ids": list(own.taps),
            "mask_token_id": own.mask_token,
            # Programs differ in what they take where the key is absent.
            "sample_from_anchor": own.anchor_first,
            "sliding_window_non_causal": any(sliding) and not any(own.causal),
        }
        if kind == "dspark":
            config |= _dspark_settings(own)
        if own.draft_vocab_size is not None:
            tensors |= vocabulary_maps(head.draft_tokens.cpu(), llama.vocab_size)
        return config, tensors

    def own_settings(self, config: BlockConfig, inner: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the official config.json says besides the layers.

        Args:
            inner: the keys that both layouts have.
        """
        raise NotImplementedError


class DFlashKind(BlockKind):
    """DFlash and JetSpec: the slots of a block are independent."""

    name = "dflash"
    label = "DFlash"

    def own_settings(self, config: BlockConfig, inner: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        return {"architectures": ["DFlashDraftModel"], "dflash_config": dict(inner)}


class DSparkKind(BlockKind):
    """DSpark: a Markov head says which token follows which, a confidence head how far to go."""

    name = "dspark"
    label = "DSpark"
    sign = "markov_head.markov_w1.weight"
    parts = (MARKOV, CONFIDENCE)

    def own_settings(self, config: BlockConfig, inner: Mapping[str, Any]) -> dict[str, Any]:
        return {"architectures": ["Qwen3DSparkModel"], **inner, **_dspark_settings(config)}


class DominoKind(BlockKind):
    """Domino: a GRU over the path corrects the logits."""

    name = "domino"
    label = "Domino"
    sign = "prefix_gru.weight_ih_l0"
    parts = (DOMINO,)

    def own_settings(self, config: BlockConfig, inner: Mapping[str, Any]) -> dict[str, Any]:
        assert config.domino is not None
        correction = {
            "projector_type": self.name,
            "emb_dim": config.domino.rank,
            "gru_hidden_dim": config.domino.state_size,
            "pure_draft_prefix_len": config.domino.first_slot,
            "shift_label": config.anchor_first,
        }
        return {"architectures": ["DFlashDraftModel"], "dflash_config": {**inner, **correction}}


class DFlash2Kind(BlockKind):
    """DFlash2: convolutions in the layers, and a selector among the candidates of each slot."""

    name = "dflash2"
    label = "DFlash2"
    sign = "candidate_selector.predecessor_codebook"
    parts = (SELECTOR, "layers.0.mlp_conv.base_kernel")

    def own_settings(self, config: BlockConfig, inner: Mapping[str, Any]) -> dict[str, Any]:
        sizes: dict[str, Any] = {}
        if config.selector is not None:
            sizes |= {"selector_rank": config.selector.rank, "selector_top_k": config.selector.top_k}
        if config.convolution is not None:
            sizes |= {"conv_kernel_size": config.convolution.taps, "conv_group_size": config.convolution.group}
        return {"architectures": ["DFlash2DraftModel"], "dflash_config": {**inner, **sizes}}


def _dspark_settings(config: BlockConfig) -> dict[str, Any]:
    """Return what DeepSpec and speculators say of DSpark's heads."""
    markov = config.markov
    return {
        "markov_rank": markov.rank if markov else 0,
        "markov_head_type": markov.kind if markov else MARKOV_KINDS[0],
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_reads_token and markov is not None,
    }


def _variants(config: BlockConfig) -> tuple[str, ...]:
    """Return what tells the head from others of its kind, for people."""
    causal = [str(layer) for layer, one in enumerate(config.causal) if one]
    domino, selector, conv = config.domino, config.selector, config.convolution
    cases = {
        f"block of {config.block_size}, {config.num_slots} drafted": True,
        f"causal inside a block in layers {', '.join(causal)}": causal,
        f"{config.markov.kind} Markov head of rank {config.markov.rank}" if config.markov else "": config.markov,
        f"GRU of {domino.state_size}, correction of rank {domino.rank}" if domino else "": domino,
        f"selector of rank {selector.rank} among {selector.top_k} candidates" if selector else "": selector,
        f"convolutions of {conv.taps} taps, {conv.group} channels a group" if conv else "": conv,
        "confidence head": config.confidence,
    }
    return tuple(sentence for sentence, holds in cases.items() if holds)
