"""A draft head's tensors under one set of names, whatever names its file uses."""

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from specdec.draft_heads.llama.checkpoint_files import CheckpointError, check_fit

EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
# Prefixes in other layouts, and here: official EAGLE-3, speculators' EAGLE-1, SGLang's first EAGLE-3.1, DFlash, Domino.
ALIASES = (
    ("midlayer.", "layers.0."),
    ("transformer.", "layers.0."),
    ("fusion_fc.", "fc."),
    ("aux_norm_low.", "fc_norm.0."),
    ("aux_norm_mid.", "fc_norm.1."),
    ("aux_norm_high.", "fc_norm.2."),
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
    ("prefix_gru.", "domino_head.prefix_gru."),
    ("embed_proj.", "domino_head.embed_proj."),
)


class HeadTensors:
    """Tensors named as in the official EAGLE layouts, except for the first layer, which is `layers.0` in EAGLE-3 too.

    Attributes:
        by_name: the tensors.
        spellings: the file's names, by the names here.

    Raises:
        CheckpointError: two of the file's names mean one tensor.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.by_name: dict[str, Tensor] = {}
        self.spellings: dict[str, str] = {}
        for spelling, tensor in tensors.items():
            name = _plain(spelling)
            if name in self.by_name:
                raise CheckpointError(f"tensors {self.spellings[name]!r} and {spelling!r} have the same meaning")
            self.by_name[name] = tensor
            self.spellings[name] = spelling

    def __contains__(self, name: str) -> bool:
        return name in self.by_name

    @property
    def num_layers(self) -> int:
        """Number of layers that have any tensor."""
        return len({name.split(".")[1] for name in self.by_name if name.startswith("layers.")})

    def has(self, part: str) -> bool:
        """Return whether the first layer has a tensor, such as `self_attn.q_norm.weight`."""
        return f"layers.0.{part}" in self.by_name

    def has_any(self, *prefixes: str) -> bool:
        """Return whether the name of a tensor begins with one of these."""
        return any(name.startswith(prefixes) for name in self.by_name)

    def spells(self, prefix: str) -> bool:
        """Return whether the file's name of a tensor begins with this, behind `model.`."""
        return any(_inside_model(name).startswith(prefix) for name in self.spellings.values())

    def spelling(self, name: str) -> str:
        """Return the name that the file has for a tensor, or would have."""
        if name in self.spellings:
            return self.spellings[name]
        for alias, plain in ALIASES:
            family = alias.partition("_")[0]
            # A name that is only longer here is in no file.
            is_used = alias in plain or any(family in used for used in self.spellings.values())
            if name.startswith(plain) and is_used:
                return alias + name.removeprefix(plain)
        return name

    def check(self, expected: Mapping[str, Sequence[int]], id_maps: Collection[str] = ()) -> None:
        """Check that exactly these tensors are there.

        Args:
            expected: shapes of the weights by name.
            id_maps: names of tensors of token ids, which may be there as well.

        Raises:
            CheckpointError: names what is missing, unexpected, or of another shape or type, as the file spells it.
        """
        for name in id_maps:
            if name in self.by_name and self.by_name[name].is_floating_point():
                raise CheckpointError(f"{self.spelling(name)} holds fractions, not token ids")
        weights = {name: tensor for name, tensor in self.by_name.items() if name in expected or name not in id_maps}
        check_fit(
            {self.spelling(name): tensor for name, tensor in weights.items()},
            {self.spelling(name): shape for name, shape in expected.items()},
        )


def _inside_model(name: str) -> str:
    while name.startswith("model."):
        name = name.removeprefix("model.")
    return name


def _plain(name: str) -> str:
    name = _inside_model(name)
    for alias, plain in ALIASES:
        if name.startswith(alias):
            return plain + name.removeprefix(alias)
    return name
