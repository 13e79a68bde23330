"""Tau of a run's head on the prompts of held-out conversations."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specdec.core.outputs import SpeculationStats
from specdec.core.sampling_params import SamplingParams
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.formats.head_kind import HeadKind
from specdec.draft_heads.formats.head_kinds import load_head
from specdec.draft_heads.heads.draft_head import FeatureHead
from specdec.kernels.kernel_set import torch_kernels
from specdec.llm import LLM
from specdec.models.llama import LlamaModel
from specdec.train_eagle.data.chat_mask import Sample
from specdec.train_eagle.evaluation.replay import KnownAnswer, replay
from specdec.train_eagle.passes.features import OnlineFeatures

MAX_TOKENS = 96
SEATS = 32


class HeldOutTau:
    """Measures heads at temperature 0, with every tree as large as it may be.

    `answer` has the engine answer the prompts once. A head is then measured by replaying the answers, which costs its
    own passes alone.

    Args:
        files: writes the heads, which are measured as they are saved.
        path: the target's checkpoint.
        model: the target.
        run: folder of the run's state; a head is written to `latest` in it.
        held_out: conversations, whose first answers are made anew.
        most: most of them that are answered, spread over all.
    """

    def __init__(
        self,
        files: HeadKind[Any, Any],
        path: Path,
        model: LlamaModel,
        run: Path,
        held_out: Sequence[Sample],
        most: int,
    ) -> None:
        self._files, self._path, self._model, self._folder = files, path, model, run / "latest"
        # Kept requests with long outputs have lost their prompts.
        asked = [sample for sample in held_out if not sample.mask[0]]
        count = min(most, len(asked))
        chosen = [asked[i * len(asked) // count] for i in range(count)]
        self._prompts = [list(sample.token_ids[: sample.mask.index(True)]) for sample in chosen]
        self._answers: list[KnownAnswer] = []

    @property
    def num_prompts(self) -> int:
        """Return the number of prompts that are answered."""
        return len(self._prompts)

    def measure(self, head: FeatureHead, shape: DraftShape) -> SpeculationStats:
        """Return the figures of a head with trees as large as `shape` allows; nothing is counted without prompts."""
        if not self._answers:
            return SpeculationStats()
        self._files.save(head, self._folder, {})
        kernels = torch_kernels(self._model.embed_tokens.weight.device)
        draft = load_head(self._folder, self._model.parts, kernels).draft
        return SpeculationStats.total(replay(draft, self._answers, shape, kernels))

    def answer(self, taps: Sequence[int]) -> None:
        """Answer the prompts, and keep the target's states on the CPU.

        The engine has a second copy of the target on the device meanwhile.

        Args:
            taps: the target layers that heads read.
        """
        if not self._prompts:
            return
        dtype = str(self._model.embed_tokens.weight.dtype).removeprefix("torch.")
        # Bounds the cache: on a GPU it takes what training leaves.
        longest = min(self._model.config.max_position, max(map(len, self._prompts)) + MAX_TOKENS)
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        with LLM(self._path, draft=None, dtype=dtype, max_num_seqs=SEATS, max_model_len=longest) as llm:
            outputs = llm.generate(self._prompts, params, use_tqdm=False)
        texts = [output.prompt_token_ids + output.token_ids for output in outputs]
        source = OnlineFeatures(self._model, [Sample(text, [True] * len(text)) for text in texts], taps)
        batches = [source.batch([i]).to(torch.device("cpu")) for i in range(len(texts))]
        self._answers = [KnownAnswer(batch, len(prompt)) for batch, prompt in zip(batches, self._prompts, strict=True)]
