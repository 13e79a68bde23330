"""Settings and parts of a block head, by its config.json in the keys of several programs, and by its tensors."""

from pathlib import Path
from typing import NamedTuple

from specdec.draft_heads.formats.head_settings import HeadSettings, Layout
from specdec.draft_heads.formats.head_tensors import HeadTensors
from specdec.draft_heads.formats.tap_ids import Counting, TapIds, layer_list
from specdec.draft_heads.heads.convolved_layer import ConvolutionConfig
from specdec.draft_heads.heads.edge_scorers import CANDIDATES, MARKOV_KINDS, DominoConfig, MarkovConfig, SelectorConfig
from specdec.draft_heads.llama.checkpoint_files import CheckpointError, flag, items, read_config, section
from specdec.draft_heads.llama.llama_config import positive

# Programs that count outputs of layers, and the one that counts their inputs.
OUTPUTS, INPUTS = "target_layer_ids", "aux_hidden_state_layer_ids"
NESTED = "dflash_config"
# Settings that may only have the value with which they change nothing.
NEUTRAL = {"logit_scale": 1, "input_embedding_scale": 1, "output_multiplier": 1, "final_logit_softcapping": 0}
MARKOV, CONFIDENCE, DOMINO, SELECTOR = "markov_head.", "confidence_head.", "domino_head.", "candidate_selector."


def block_rows(folder: Path) -> int | None:
    """Return the rows of a block head's pass, if they are as many for trees of any depth.

    None for a head with causal layers alone, whose pass has fewer rows for shallower trees, and if config.json is not
    of a block head.
    """
    try:
        settings = HeadSettings.from_json(read_config(folder))
        own = BlockSettings(settings, positive(settings.layer, "num_hidden_layers", 1))
        return own.block_size if own.values.get("mask_token_id") is not None and not all(own.causal()) else None
    except CheckpointError:
        # Loading the head says what is wrong.
        return None


class BlockSettings:
    """Settings of a block head. What config.json does not say follows from the tensors, or is refused.

    Args:
        num_layers: layers of the head.

    Attributes:
        values: the keys of config.json, those in `dflash_config` before those beside it.
    """

    def __init__(self, settings: HeadSettings, num_layers: int) -> None:
        self.settings, self.num_layers = settings, num_layers
        nested = section(settings.own, NESTED)
        self.values = {**settings.own, **{key: value for key, value in nested.items() if value is not None}}
        for key, only in NEUTRAL.items():
            value = self.values.get(key)
            if value not in (None, only):
                raise CheckpointError(f"config.json: {key} = {value!r} is not supported; only {only} is")

    @property
    def block_size(self) -> int:
        """Rows of a block."""
        return positive(self.values, "block_size")

    def check_kind(self, name: str, label: str) -> None:
        """Check that config.json does not name another kind than the tensors show.

        Plain DFlash is the name that others give themselves too.

        Raises:
            CheckpointError: it does: without the tensors of that kind, drafts would be wrong.
        """
        keys = ("architectures", "projector_type", "speculators_model_type")
        said = " ".join(str(self.values.get(key)) for key in keys).lower()
        for other in ("domino", "dflash2"):
            if other in said and name != other:
                raise CheckpointError(f"config.json names a {other} head, but the tensors are those of a {label} head")

    def mask_token(self, vocab_size: int) -> int:
        """Return the id of the mask token: a row of the embedding, which may be none of the tokenizer's tokens.

        Raises:
            CheckpointError: it is missing, or no row of the embedding.
        """
        token = self.values.get("mask_token_id")
        if type(token) is not int or not 0 <= token < vocab_size:
            raise CheckpointError(f"config.json: mask_token_id = {token!r} must be an id below vocab_size {vocab_size}")
        return token

    def anchor_first(self, has_edges: bool) -> tuple[bool, list[str]]:
        """Return whether row 0 predicts, and what was assumed about it.

        Args:
            has_edges: whether the file has a Markov head, as DSpark does.

        Raises:
            CheckpointError: it is neither true nor false.
        """
        for key in ("sample_from_anchor", "shift_label"):
            if self.values.get(key) is not None:
                return flag(self.values, key), []
        way = "row 0 predicts, as in DSpark" if has_edges else "row 0 predicts nothing, as in DFlash"
        return has_edges, [f"config.json is silent about sample_from_anchor: {way}"]

    def causal(self) -> tuple[bool, ...]:
        """Return which layers are causal inside a block.

        In speculators sliding layers are, unless `sliding_window_non_causal`, by default true for DFlash2. Elsewhere
        `is_causal`, `causal` or `causal_head` (JetSpec) speak for all layers; without them sliding layers are causal.

        Raises:
            CheckpointError: a flag that is neither true nor false.
        """
        kinds = items(self.settings.layer, "layer_types")
        sliding = [layer < len(kinds) and kinds[layer] == "sliding_attention" for layer in range(self.num_layers)]
        if self.settings.layout == Layout.SPECULATORS:
            key = "sliding_window_non_causal"
            both = flag(self.values, key, self.values.get("speculators_model_type") == "dflash2")
            return tuple(one and not both for one in sliding)
        for key in ("is_causal", "causal", "causal_head"):
            if self.values.get(key) is not None:
                return (flag(self.values, key),) * self.num_layers
        return tuple(sliding)

    def taps(self) -> TapIds:
        """Return the target layers that the head reads.

        Raises:
            CheckpointError: config.json names none, or they are no list of layers.
        """
        inputs, outputs = self.values.get(INPUTS), self.values.get(OUTPUTS)
        if inputs is None and outputs is None:
            raise CheckpointError(f"config.json names no layers of the target to read, by {OUTPUTS} or {INPUTS}")
        if outputs is None:
            return TapIds(layer_list(inputs, INPUTS), Counting.INPUTS, "speculators", INPUTS)
        return TapIds(layer_list(outputs, OUTPUTS), Counting.OUTPUTS, str(self.settings.layout), OUTPUTS)


class BlockParts(NamedTuple):
    """Edge scorer and convolutions of a head, by the names of `BlockConfig`; None where it has none."""

    markov: MarkovConfig | None
    domino: DominoConfig | None
    selector: SelectorConfig | None
    convolution: ConvolutionConfig | None

    @staticmethod
    def of(own: BlockSettings, tensors: HeadTensors, hidden_size: int) -> "BlockParts":
        """Return the parts of a head.

        Raises:
            CheckpointError: config.json contradicts the tensors.
        """
        return BlockParts(_markov(own, tensors), _domino(own, tensors), *_selector(own, tensors, hidden_size))


def _markov(own: BlockSettings, tensors: HeadTensors) -> MarkovConfig | None:
    weight = tensors.by_name.get(f"{MARKOV}markov_w1.weight")
    rank = 0 if weight is None or weight.ndim != 2 else weight.shape[1]
    signs = {"markov_head.gate_proj.weight": "gated", "markov_head.joint_proj.weight": "rnn"}
    kind = next((kind for name, kind in signs.items() if name in tensors), MARKOV_KINDS[0])
    for key, found in (("markov_rank", rank), ("markov_head_type", kind)):
        if rank or key == "markov_rank":
            _agree(own, key, found)
    return MarkovConfig(rank, kind) if rank else None


def _domino(own: BlockSettings, tensors: HeadTensors) -> DominoConfig | None:
    if not tensors.has_any(DOMINO):
        return None
    size = _columns(tensors, own, f"{DOMINO}prefix_gru.weight_hh_l0", "gru_hidden_dim")
    rank = _columns(tensors, own, f"{DOMINO}embed_proj.2.weight", "emb_dim")
    first = own.values.get("pure_draft_prefix_len") or 0
    if type(first) is not int or first < 0:
        raise CheckpointError(f"config.json: pure_draft_prefix_len = {first!r} must be a whole number of at least 0")
    return DominoConfig(rank, size, first)


def _selector(
    own: BlockSettings, tensors: HeadTensors, hidden_size: int
) -> tuple[SelectorConfig | None, ConvolutionConfig | None]:
    selector = convolution = None
    if tensors.has_any(SELECTOR):
        rank = _columns(tensors, own, f"{SELECTOR}predecessor_codebook", "selector_rank")
        top_k = positive(own.values, "selector_top_k", 16)
        if top_k > CANDIDATES:
            raise CheckpointError(
                f"config.json: selector_top_k = {top_k} is not supported; it may be at most {CANDIDATES}"
            )
        selector = SelectorConfig(rank, top_k)
    if tensors.has("attention_conv.base_kernel") or tensors.has("mlp_conv.base_kernel"):
        taps, group = positive(own.values, "conv_kernel_size", 2), positive(own.values, "conv_group_size", 16)
        if hidden_size % group:
            raise CheckpointError(f"config.json: conv_group_size = {group} does not divide hidden_size {hidden_size}")
        convolution = ConvolutionConfig(taps, group)
    return selector, convolution


def _columns(tensors: HeadTensors, own: BlockSettings, name: str, key: str) -> int:
    """Return the columns of a matrix, which config.json may name by a key; 1 if it is missing, which is told later."""
    matrix = tensors.by_name.get(name)
    if matrix is None or matrix.ndim != 2 or not matrix.shape[1]:
        return 1
    _agree(own, key, matrix.shape[1])
    return matrix.shape[1]


def _agree(own: BlockSettings, key: str, found: object) -> None:
    named = own.values.get(key)
    if named is not None and named != found:
        raise CheckpointError(f"config.json: {key} = {named!r}, but the tensors are those of {found!r}")
