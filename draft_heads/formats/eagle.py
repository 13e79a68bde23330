"""EAGLE-1/2 heads in files: the official layout, and the variants of vLLM, SGLang and speculators."""

from functools import partial
from typing import Any

from torch import Tensor

from specdec.draft_heads.formats.draft_vocab import mapped_tokens
from specdec.draft_heads.formats.head_kind import HeadDescription, HeadKind, LoadedHead, Source, expected_shapes, filled
from specdec.draft_heads.formats.head_settings import HeadSettings, Layout, layer_settings
from specdec.draft_heads.formats.head_tensors import EMBEDDING, OUTPUT, HeadTensors
from specdec.draft_heads.heads.draft_head import DraftModel, TargetParts
from specdec.draft_heads.heads.eagle import EagleConfig, EagleHead
from specdec.draft_heads.heads.readout import MatrixReadout
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.draft_heads.llama.llama_config import positive
from specdec.kernels.kernel_set import KernelSet

TOKEN_MAP = "token_map"
# Keys by which config.json says that fc has a bias.
FC_BIAS_KEYS = ("bias", "eagle_fc_bias", "fusion_bias")
# Official heads use the target's output matrix; files of these layouts may hold a copy of it, or of some rows.
WITH_OUTPUT = (Layout.VLLM, Layout.SGLANG)


class EagleKind(HeadKind[EagleConfig, EagleHead]):
    """EAGLE-1 and EAGLE-2, whose heads are alike."""

    name = "eagle"
    label = "EAGLE-1/2"
    sign = "fc.weight"
    id_maps = (TOKEN_MAP,)

    def describe(self, settings: HeadSettings, tensors: HeadTensors) -> HeadDescription[EagleConfig]:
        llama, assumptions = settings.llama(tensors)
        said = [settings.own[key] for key in FC_BIAS_KEYS if settings.own.get(key) is not None]
        has_bias = "fc.bias" in tensors
        if not said:
            found = "one" if has_bias else "none"
            assumptions.append(f"config.json is silent about a bias of fc: the file has {found}")
        has_embedding = EMBEDDING in tensors
        if not has_embedding:
            assumptions.append("the file has no embedding: the target's")
        has_output = settings.layout in WITH_OUTPUT and OUTPUT in tensors
        tokens, rows, guesses = _output_rows(settings, tensors, llama.vocab_size)
        config = EagleConfig(llama, has_bias or any(said))
        expected = expected_shapes(lambda: EagleHead(config).split_parameters())
        if has_output:
            expected[OUTPUT] = [rows, llama.hidden_size]
        if not has_embedding:
            del expected[EMBEDDING]
        return HeadDescription(
            kind=self,
            label=self.label,
            settings=settings,
            config=config,
            tensors=tensors,
            expected=expected,
            embedding=Source.FILE if has_embedding else Source.TARGET,
            output=Source.FILE if has_output else Source.TARGET,
            reads=llama.hidden_size,
            tokens=tokens,
            id_maps=() if tokens is None else self.id_maps,
            selects_rows=tokens is not None,
            variants=("fc.bias",) if config.fc_bias else (),
            assumptions=(*assumptions, *guesses),
        )

    def build(self, description: HeadDescription[EagleConfig], target: TargetParts, kernels: KernelSet) -> LoadedHead:
        config, given = description.config, description.tensors.by_name
        head = filled(partial(EagleHead, config), given, description.lent(target), target)
        matrix = given[OUTPUT].to(target.embedding) if description.output == Source.FILE else None
        return LoadedHead(
            DraftModel(head.form(kernels), _readout(description.tokens, matrix, target, kernels)), description
        )

    def check_official(self, description: HeadDescription[EagleConfig]) -> None:
        if description.embedding != Source.FILE:
            raise CheckpointError("it has no embedding; the official layout of EAGLE-1/2 asks for one")
        if description.output != Source.TARGET or description.tokens is not None:
            raise CheckpointError(
                "it has an output matrix of its own; the official layout of EAGLE-1/2 has no place for one"
            )

    def official(self, head: EagleHead) -> tuple[dict[str, Any], dict[str, Tensor]]:
        llama = head.llama
        config = {**layer_settings(llama), "bias": head.config.fc_bias, "qkv_bias": llama.attention_bias}
        return config, head.split_parameters()


def _output_rows(settings: HeadSettings, tensors: HeadTensors, vocab_size: int) -> tuple[Tensor | None, int, list[str]]:
    """Return the tokens that are scored, None for all; the rows of the file's output matrix; and assumptions."""
    own = settings.own
    frequent = positive(own, "truncated_vocab_size", positive(own, "hot_vocab_size", vocab_size))
    has_own = settings.layout in WITH_OUTPUT
    matrix = tensors.by_name.get(OUTPUT) if has_own else None
    is_whole = matrix is None or len(matrix) == vocab_size
    if has_own and TOKEN_MAP in tensors:
        tokens = mapped_tokens(tensors.by_name[TOKEN_MAP], vocab_size)
        if len(tokens) != frequent:
            raise CheckpointError(f"token_map holds {len(tokens)} tokens, config.json says {frequent}")
        return tokens, vocab_size if is_whole else frequent, []
    if frequent == vocab_size:
        return None, vocab_size, []
    if not is_whole:
        raise CheckpointError(f"lm_head.weight has rows for {frequent} tokens, but there is no token_map to tell which")
    return None, vocab_size, [f"which {frequent} tokens are frequent, as config.json says, is not told: all are scored"]


def _readout(tokens: Tensor | None, matrix: Tensor | None, target: TargetParts, kernels: KernelSet) -> MatrixReadout:
    """Return the readout of `tokens`, None for all of them.

    Args:
        matrix: the head's own output matrix; None if it uses the target's.

    Raises:
        CheckpointError: rows of the target's, which an engine with rounded weights no longer has.
    """
    vocab_size = target.config.vocab_size
    if tokens is None:
        return MatrixReadout(kernels.draft_output(matrix, target.output), vocab_size)
    matrix = target.output.weight if matrix is None else matrix
    if not len(matrix):
        raise CheckpointError(
            "it scores some rows of the target's output matrix, which is in memory in rounded form alone; "
            "start the engine anew with it"
        )
    ordered, order = tokens.to(matrix.device).sort()
    chosen = matrix[ordered if len(matrix) == vocab_size else order]
    return MatrixReadout(kernels.draft_output(chosen, target.output), vocab_size, ordered)
