"""Tau of a head on texts that the target is known to say, without running the target; and of a run's head on those of
held-out conversations.
"""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from specdec.core.outputs import SpeculationStats
from specdec.core.sampling_params import SamplingParams
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.drafter import DraftRow, Proposal
from specdec.draft_heads.drafting.drafters import drafter_of, shape_for
from specdec.draft_heads.formats.head_kind import HeadKind
from specdec.draft_heads.formats.head_kinds import load_head
from specdec.draft_heads.heads.draft_head import DraftModel, FeatureHead, HeadForm
from specdec.kernels.kernel_set import KernelSet, torch_kernels
from specdec.kernels.types.draft_trees import HostTrees
from specdec.kernels.types.integers import ceil_div
from specdec.kernels.types.tree import ROOT, DraftTree
from specdec.llm import LLM
from specdec.models.llama import LlamaModel
from specdec.train_eagle.data.chat_mask import Sample
from specdec.train_eagle.passes.features import FeatureBatch, OnlineFeatures
from specdec.verify.sampling import Context, Sampling

BLOCK_SIZE = 16
# Of the answers to held-out prompts.
MAX_TOKENS = 96
SEATS = 32


class KnownAnswer(NamedTuple):
    """An answer of the target at temperature 0.

    Attributes:
        batch: one conversation, which ends with the answer, and the target's states of all its tokens.
        start: tokens before the answer.
    """

    batch: FeatureBatch
    start: int


@torch.no_grad()
def replay(
    draft: DraftModel, answers: Sequence[KnownAnswer], shape: DraftShape, kernels: KernelSet
) -> list[SpeculationStats]:
    """Draft along answers as the engine does at temperature 0, with every tree as large as `shape` allows.

    No output depends on drafts, so the tokens that a step accepts are those that the tree shares with the answer. A
    step costs the head's passes alone.

    Args:
        draft: the head, in the form of `kernels`.

    Returns:
        The figures of each answer. As in the engine, its first token comes with the prompt and is no step's.
    """
    head, bounds = draft.head, shape_for(draft, shape)
    blocks = [ceil_div(len(answer.batch.tokens) + bounds.slots, BLOCK_SIZE) for answer in answers]
    tables = [range(end - count, end) for end, count in zip(accumulate(blocks), blocks, strict=True)]
    slots, llama, weight = sum(blocks) * BLOCK_SIZE, head.llama, draft.readout.projection.weight
    kv = weight.new_zeros(llama.num_layers, slots, 2 * llama.num_kv_heads, llama.head_dim)
    features = weight.new_zeros(slots, head.feature_size)
    for table, answer in zip(tables, answers, strict=True):
        # The features of tokens that are not known yet lie where nothing reads them.
        begin = table[0] * BLOCK_SIZE
        states = answer.batch.to(kv.device).read_by(cast("HeadForm", head))
        features[begin : begin + len(states)] = states
    drafter = drafter_of(draft, kv, features, BLOCK_SIZE, kv.dtype, bounds, Proposal.COUPLED, kernels)
    walks = [_Walk(answer, table) for answer, table in zip(answers, tables, strict=True)]
    while left := [walk for walk in walks if walk.known < len(walk.tokens)]:
        drafted = drafter.propose([walk.row(bounds) for walk in left])
        assert isinstance(drafted, HostTrees)
        for walk, tree in zip(left, drafted.trees, strict=True):
            walk.step(tree)
    return [walk.stats for walk in walks]


class _Walk:
    """An answer as far as it is known. Its first token comes with the prompt."""

    def __init__(self, answer: KnownAnswer, table: Sequence[int]) -> None:
        self.tokens, self.table, self.prompt = answer.batch.tokens.tolist(), table, answer.start
        self.known, self.read, self.stats = answer.start + 1, 0, SpeculationStats()

    def row(self, shape: DraftShape) -> DraftRow:
        """Return the row of the next step, whose tree is no deeper than the answer is long."""
        known, depth = self.known, min(shape.depth, len(self.tokens) - self.known - 1)
        context = Context(Sampling(), self.tokens[:known], self.prompt)
        row = DraftRow(self.table, self.read, known, shape.nodes if depth else 0, depth, context)
        self.read = known
        return row

    def step(self, tree: DraftTree) -> None:
        """Take the tokens that the tree shares with the answer, and the one behind them."""
        node, accepted = ROOT, 0
        while (child := tree.children.get((node, self.tokens[self.known + accepted]))) is not None:
            node, accepted = child, accepted + 1
        self.known += accepted + 1
        self.stats.count(accepted, accepted + 1, len(tree))


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
