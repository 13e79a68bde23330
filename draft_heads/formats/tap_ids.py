"""The target layers that a head reads, from ids that two conventions count differently."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from specdec.draft_heads.formats.head_settings import HeadSettings, Layout
from specdec.draft_heads.heads.eagle3 import default_taps
from specdec.draft_heads.llama.checkpoint_files import CheckpointError, section

KEY = "eagle_aux_hidden_state_layer_ids"


class Counting(StrEnum):
    """Meaning of an id k.

    Attributes:
        INPUTS: the input of layer k, transformers' `hidden_states[k]` (vLLM and speculators).
        OUTPUTS: the output of layer k, `hidden_states[k + 1]` (SpecForge, and ids that are given to SGLang).
    """

    INPUTS = "inputs of layers"
    OUTPUTS = "outputs of layers"


class Taps(NamedTuple):
    """Layers whose inputs a head reads.

    Attributes:
        layers: the layers that the ids mean, as far as known.
        others: the same ids counted the other way; empty if that meaning is ruled out.
        reason: why `layers` was preferred.
    """

    layers: tuple[int, ...]
    others: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class TapIds:
    """Layer ids in config.json.

    Attributes:
        ids: None if it gives none.
        counting: the likelier convention.
        settled_by: the program or setting that makes it certain; empty if the number of layers or a probe must decide.
        key: of config.json.
    """

    ids: tuple[int, ...] | None
    counting: Counting = Counting.INPUTS
    settled_by: str = ""
    key: str = KEY

    def __str__(self) -> str:
        """Return what the ids mean, as far as that is known without a target."""
        if self.ids is None:
            return "the official layers of a target: 2, the middle one, the last but two"
        if self.settled_by:
            return f"{self.counting} {list(self.ids)}, as {self.settled_by} counts them"
        return f"{list(self.ids)}, inputs or outputs of layers: perhaps a target's number of layers tells"

    def of(self, num_layers: int) -> Taps:
        """Return the layers that the ids mean in a target with `num_layers` layers.

        Raises:
            CheckpointError: the target has no such layers.
        """
        if self.ids is None:
            return Taps(default_taps(num_layers), (), "config.json names none: the official ones")
        layers = {Counting.INPUTS: self.ids, Counting.OUTPUTS: tuple(tap + 1 for tap in self.ids)}
        other = Counting.OUTPUTS if self.counting == Counting.INPUTS else Counting.INPUTS
        countings = (self.counting,) if self.settled_by else (self.counting, other)
        fitting = [one for one in countings if all(0 <= tap <= num_layers for tap in layers[one])]
        if not fitting:
            raise CheckpointError(f"{self.key} = {list(self.ids)} are no layers of a target that has {num_layers}")
        if self.settled_by:
            return Taps(layers[self.counting], (), f"{self.counting}, as {self.settled_by} counts them")
        if len(fitting) == 1:
            reason = f"{fitting[0]}, since a target of {num_layers} layers has no others"
            return Taps(layers[fitting[0]], (), reason)
        for one in fitting if num_layers >= 7 else ():
            if layers[one] == default_taps(num_layers):
                return Taps(layers[one], (), f"{one}, since they then are the official ones")
        return Taps(layers[self.counting], layers[other], f"{self.counting}, a guess")


def tap_ids(settings: HeadSettings) -> TapIds:
    """Read the layer ids, wherever config.json has them.

    Raises:
        CheckpointError: not a list of layers, or two lists that contradict each other.
    """
    outer, inner = settings.own.get(KEY), section(settings.own, "eagle_config").get(KEY)
    lists = [layer_list(value, KEY) for value in (outer, inner) if value is not None]
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


def layer_list(value: object, key: str) -> tuple[int, ...]:
    """Return the ids of layers under a key of config.json.

    Raises:
        CheckpointError: the value is no list of layers, or names one twice.
    """
    if not isinstance(value, list) or not value or not all(type(tap) is int for tap in value):
        raise CheckpointError(f"{key} = {value!r} must be a list of layers")
    if len(set(value)) < len(value):
        raise CheckpointError(f"{key} = {value} names a layer twice")
    return tuple(value)
