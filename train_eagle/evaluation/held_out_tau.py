"""Tau of a run's head on the prompts of held-out conversations."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec.core.outputs import SpeculationStats
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.formats.head_kind import HeadKind
from specdec.draft_heads.heads.draft_head import FeatureHead
from specdec.train_eagle.data.chat_mask import Sample
from specdec.train_eagle.evaluation.head_evaluation import measure_tau


class HeldOutTau:
    """Measures heads by the engine, at temperature 0.

    Args:
        files: writes the heads.
        model: the target.
        run: folder of the run's state; a head is written to `latest` in it.
        held_out: conversations, whose first answers are made anew.
        most: most of them that are answered, spread over all.
    """

    def __init__(
        self, files: HeadKind[Any, Any], model: Path, run: Path, held_out: Sequence[Sample], most: int
    ) -> None:
        self._files, self._model, self._folder = files, model, run / "latest"
        count = min(most, len(held_out))
        chosen = [held_out[i * len(held_out) // count] for i in range(count)]
        self._prompts = [sample.token_ids[: sample.mask.index(True)] for sample in chosen]

    @property
    def num_prompts(self) -> int:
        """Return the number of prompts that are answered."""
        return len(self._prompts)

    def measure(self, head: FeatureHead, shape: DraftShape) -> SpeculationStats:
        """Answer the prompts with trees as large as `shape` allows; nothing is counted if there are none."""
        if not self._prompts:
            return SpeculationStats()
        self._files.save(head, self._folder, {})
        return measure_tau(self._model, self._folder, self._prompts, shape=shape)
