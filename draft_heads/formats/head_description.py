"""What a folder was recognised as, before anything of it is built."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from specdec.draft_heads.formats.head_settings import Layout
from specdec.draft_heads.formats.head_tensors import VOCABULARY_MAPS, HeadTensors
from specdec.draft_heads.formats.tap_ids import TapIds
from specdec.draft_heads.heads.draft_head import TargetSizes
from specdec.draft_heads.heads.eagle import EagleConfig
from specdec.draft_heads.heads.eagle3 import Eagle3Config
from specdec.draft_heads.llama.checkpoint_files import CheckpointError


class Source(StrEnum):
    """Where a matrix comes from."""

    FILE = "its own"
    TARGET = "the target's"
    EMBEDDING = "its embedding"


@dataclass(frozen=True)
class HeadDescription:
    """A head and all that its folder leaves to be guessed.

    Attributes:
        kind: "EAGLE-1/2", "EAGLE-3" or "EAGLE-3.1".
        layout: whose conventions its config.json follows.
        config: its shape; which layers an EAGLE-3 head reads is not settled in it, only how many.
        tensors: what the file holds.
        expected: shapes of what it must hold, by the same names.
        embedding: FILE or TARGET.
        output: where the output matrix comes from.
        tokens: int64, the target's ids of that matrix's rows; None for all tokens in order.
        taps: the layers that an EAGLE-3 head reads.
        verifier: name or path of the target that it was trained for, if it says so.
        assumptions: sentences.
    """

    kind: str
    layout: Layout
    config: EagleConfig | Eagle3Config
    tensors: HeadTensors
    expected: Mapping[str, list[int]]
    embedding: Source
    output: Source
    tokens: Tensor | None = None
    taps: TapIds | None = None
    verifier: str | None = None
    assumptions: tuple[str, ...] = ()

    def check(self, target: TargetSizes | None = None) -> None:
        """See that it is whole, and fits a target.

        Raises:
            CheckpointError: both sizes, or what is missing, unexpected or of another shape.
        """
        if target is not None:
            self._check_target(target)
        maps = VOCABULARY_MAPS if self.tokens is not None else ("d2t", "t2d") if self.taps is not None else ()
        self.tensors.check(self.expected, maps)

    def _check_target(self, target: TargetSizes) -> None:
        llama = self.config.llama
        if isinstance(self.config, EagleConfig) and llama.hidden_size != target.hidden_size:
            raise CheckpointError(
                f"the head's hidden_size {llama.hidden_size} does not fit the target's {target.hidden_size}"
            )
        if isinstance(self.config, Eagle3Config) and self.config.target_hidden_size != target.hidden_size:
            read = self.config.target_hidden_size
            raise CheckpointError(
                f"the head reads states of size {read}, the target's are of size {target.hidden_size}"
            )
        if llama.vocab_size != target.vocab_size:
            raise CheckpointError(
                f"the head's vocab_size {llama.vocab_size} does not fit the target's {target.vocab_size}"
            )
        if self.taps is not None:
            self.taps.of(target.num_layers)

    @property
    def file_tensors(self) -> dict[str, Tensor]:
        """What the file holds, as it calls it."""
        return {self.tensors.spellings[name]: tensor for name, tensor in self.tensors.by_name.items()}
