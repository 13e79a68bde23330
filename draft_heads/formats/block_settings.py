"""Settings of a block head in its config.json, in the keys of z-lab and SpecForge, DeepSpec, and speculators."""

from pathlib import Path
from typing import Any

from specdec.draft_heads.formats.head_settings import HeadSettings, Layout, section
from specdec.draft_heads.formats.tap_ids import Counting, TapIds, layer_list
from specdec.draft_heads.llama.checkpoint_files import CheckpointError, items, read_config
from specdec.draft_heads.llama.llama_config import positive

# Programs that count outputs of layers, and the one that counts their inputs.
OUTPUTS, INPUTS = "target_layer_ids", "aux_hidden_state_layer_ids"
NESTED = "dflash_config"
# Settings that may only have the value with which they change nothing.
NEUTRAL = {"logit_scale": 1, "input_embedding_scale": 1, "output_multiplier": 1, "final_logit_softcapping": 0}


def block_rows(folder: Path) -> int | None:
    """Return the rows of a block head's pass, if they are as many for trees of any depth.

    None for a head with causal layers alone, whose pass has fewer rows for shallower trees, and if config.json is not
    of a block head.
    """
    try:
        settings = HeadSettings.from_json(read_config(folder))
        own = BlockSettings(settings, positive(settings.layer, "num_hidden_layers", 1))
        return own.block_size if own.value("mask_token_id") is not None and not all(own.causal()) else None
    except CheckpointError:
        # Loading the head says what is wrong.
        return None


class BlockSettings:
    """Settings of a block head. What config.json does not say follows from the tensors, or is refused.

    Args:
        num_layers: layers of the head.
    """

    def __init__(self, settings: HeadSettings, num_layers: int) -> None:
        self.settings, self.num_layers = settings, num_layers
        self._nested = section(settings.own, NESTED)
        for key, only in NEUTRAL.items():
            value = self.value(key)
            if value not in (None, only):
                raise CheckpointError(f"config.json: {key} = {value!r} is not supported; only {only} is")

    def value(self, key: str) -> Any:
        """Return a setting, from `dflash_config` or beside it; None where it is absent."""
        found = self._nested.get(key)
        return self.settings.own.get(key) if found is None else found

    @property
    def block_size(self) -> int:
        """Rows of a block."""
        return positive({"block_size": self.value("block_size")}, "block_size")

    def check_kind(self, name: str, label: str) -> None:
        """Check that config.json does not name another kind than the tensors show.

        Plain DFlash is the name that others give themselves too.

        Raises:
            CheckpointError: it does: without the tensors of that kind, drafts would be wrong.
        """
        keys = ("architectures", "projector_type", "speculators_model_type")
        said = " ".join(str(self.value(key)) for key in keys).lower()
        for other in ("domino", "dflash2"):
            if other in said and name != other:
                raise CheckpointError(f"config.json names a {other} head, but the tensors are those of a {label} head")

    def mask_token(self, vocab_size: int) -> int:
        """Return the id of the mask token: a row of the embedding, which may be none of the tokenizer's tokens.

        Raises:
            CheckpointError: it is missing, or no row of the embedding.
        """
        token = self.value("mask_token_id")
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
        said = self.value("sample_from_anchor")
        if said is None and self.value("shift_label") is not None:
            return self._flag("shift_label"), []
        if said is None:
            way = "row 0 predicts, as in DSpark" if has_edges else "row 0 predicts nothing, as in DFlash"
            return has_edges, [f"config.json is silent about sample_from_anchor: {way}"]
        return self._flag("sample_from_anchor"), []

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
            is_dflash2 = self.value("speculators_model_type") == "dflash2"
            both = is_dflash2 if self.value(key) is None else self._flag(key)
            return tuple(one and not both for one in sliding)
        for key in ("is_causal", "causal", "causal_head"):
            if self.value(key) is not None:
                return (self._flag(key),) * self.num_layers
        return tuple(sliding)

    def taps(self) -> TapIds:
        """Return the target layers that the head reads.

        Raises:
            CheckpointError: config.json names none, or they are no list of layers.
        """
        inputs, outputs = self.value(INPUTS), self.value(OUTPUTS)
        if inputs is None and outputs is None:
            raise CheckpointError(f"config.json names no layers of the target to read, by {OUTPUTS} or {INPUTS}")
        if outputs is None:
            return TapIds(layer_list(inputs, INPUTS), Counting.INPUTS, "speculators", INPUTS)
        return TapIds(layer_list(outputs, OUTPUTS), Counting.OUTPUTS, str(self.settings.layout), OUTPUTS)

    def _flag(self, key: str) -> bool:
        value = self.value(key)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"config.json: {key} = {value!r} must be true or false")
        return bool(value)
