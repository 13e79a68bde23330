"""A probe of which target layers a head was trained to read, for layer ids that can be counted in two ways."""

import itertools
import logging
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from specdec.cache.kv_cache import KVCache
from specdec.draft_heads.formats.head_kind import LoadedHead
from specdec.draft_heads.formats.tap_ids import KEY
from specdec.draft_heads.heads.draft_head import CachedHead, DraftModel
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.draft_heads.llama.llama_layer import PagedAttention
from specdec.draft_heads.llama.rope import rotary_at
from specdec.execution.model_runner import ModelRunner
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.types.draft_trees import HostTrees
from specdec.kernels.types.integers import ceil_div
from specdec.kernels.types.tree import TreeRow
from specdec.models.checkpoint import has_tokenizer
from specdec.models.llama import LlamaModel
from specdec.models.tokenizer import Tokenizer
from specdec.verify.tree_batch import TreeBatch

logger = logging.getLogger(__name__)
QUESTIONS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take?",
    "Write a Python function that counts the vowels in a string.",
)
# Length of the random prompts that are used without a tokenizer.
RANDOM_TOKENS = 8
NEW_TOKENS = 32
BLOCK_SIZE = 16


def settle_taps(loaded: LoadedHead, model: LlamaModel, folder: Path, kernels: KernelSet) -> DraftModel:
    """Return the head with its layer ids counted the way that predicts more of the target's tokens.

    Args:
        folder: the target's folder, for its tokenizer.

    Raises:
        ValueError: the ids can be counted in two ways, and the model is one of several pipeline stages.
    """
    draft, other = loaded.draft, loaded.other
    if other is None:
        return draft
    if model.num_stages > 1:
        raise ValueError(
            f"the head's {KEY} can be counted in two ways, which is settled by a trial with pipeline_parallel_size 1 "
            f"alone; give inputs as {KEY} in its config.json, and outputs there in eagle_config"
        )
    context = min(model.config.max_position, draft.head.llama.max_position)
    probe = TapProbe(model, prompts_for(folder, model.config.vocab_size), context, kernels)
    hits, other_hits = probe.hits(draft), probe.hits(other)
    chosen = other if other_hits > hits else draft
    found = (KEY, probe.num_guessed, hits, list(draft.head.taps), other_hits, list(other.head.taps))
    logger.warning(
        "the head's %s can be counted in two ways; of %d tokens it predicts %d if it reads the inputs of layers %s, "
        "and %d if it reads those of %s: the %s are used",
        *(*found, "first" if chosen is draft else "second"),
    )
    return chosen


def prompts_for(folder: Path, vocab_size: int) -> list[list[int]]:
    """Return token ids of questions to the target in a folder."""
    return questions(Tokenizer(folder) if has_tokenizer(folder) else None, vocab_size)


def questions(tokenizer: Tokenizer | None, vocab_size: int) -> list[list[int]]:
    """Return token ids of questions to a target, or random ones if it has no tokenizer."""
    if tokenizer is None:
        draw = random.Random(0).randrange
        return [[draw(vocab_size) for _ in range(RANDOM_TOKENS)] for _ in QUESTIONS]
    if tokenizer.has_chat_template:
        messages = [tokenizer.chat_messages([{"role": "user", "content": question}]) for question in QUESTIONS]
        return [tokenizer.encode_chat(each) for each in messages]
    return [tokenizer.encode(question) for question in QUESTIONS]


class TapProbe:
    """A target's greedy answers to a few prompts, and how many of their tokens heads predict.

    Answers do not stop at end tokens.

    Args:
        prompts: token ids.
        context: most tokens of a text.

    Attributes:
        texts: prompts and answers.
        num_guessed: number of answer tokens that a head can predict.
    """

    @torch.inference_mode()
    def __init__(self, model: LlamaModel, prompts: Sequence[Sequence[int]], context: int, kernels: KernelSet) -> None:
        self.model, self.kernels = model, kernels
        weight = model.embed_tokens.weight
        self.dtype, self.device = weight.dtype, weight.device
        self.texts = [list(prompt[: context // 2]) for prompt in prompts]
        new_tokens = min(NEW_TOKENS, context - max(map(len, self.texts)))
        # The first answer token of each text that a head can predict; it needs two tokens before it.
        self.starts = [max(len(text), 2) for text in self.texts]
        # Block tables of the texts, one after another.
        blocks = itertools.count()
        counts = [ceil_div(len(text) + new_tokens, BLOCK_SIZE) for text in self.texts]
        self.tables = [list(itertools.islice(blocks, count)) for count in counts]
        self.num_blocks = sum(counts)
        cache = KVCache(self.num_blocks, BLOCK_SIZE, model.config, None, self.dtype, self.device, kernels=kernels)
        self.runner = ModelRunner(model, cache, self.dtype)
        cached = [0] * len(self.texts)
        for _ in range(new_tokens):
            logits = model.whole(self.runner.forward(self._rows(self.texts, cached), HostTrees.empty(len(cached))))
            cached = [len(text) for text in self.texts]
            for text, token in zip(self.texts, logits.argmax(-1).tolist(), strict=True):
                text.append(token)
        self.num_guessed = sum(len(text) - start for text, start in zip(self.texts, self.starts, strict=True))

    @torch.inference_mode()
    def hits(self, draft: DraftModel) -> int:
        """Return how many answer tokens are a head's likeliest token, one step ahead of the target."""
        # Only heads that draft level by level have ids that can be counted in two ways.
        states, tokens = self.guessing(draft.head)
        found = draft.readout(states)
        best = found.scores.argmax(-1)
        return int(((best if found.tokens is None else found.tokens[best]) == tokens).sum())

    @torch.inference_mode()
    def guessing(self, head: CachedHead) -> tuple[Tensor, Tensor]:
        """Return the head's output matrix input before each answer token, `[tokens, size]`, and the tokens."""
        batch, attentions = self._pass(self.texts, self.runner.cache.target, self.model.config)
        output = self.model(batch.tokens, rotary_at(self.runner.rope, batch.positions), attentions, head.taps)
        features = torch.split(head.feature_of(output), [len(text) for text in self.texts])
        # The head's row of token i reads the target's feature of token i - 1, at the rotary position i - 1.
        llama = head.llama
        size = (llama.num_layers, self.num_blocks * BLOCK_SIZE, 2 * llama.num_kv_heads, llama.head_dim)
        kv = torch.zeros(size, dtype=self.dtype, device=self.device)
        batch, attentions = self._pass([text[1:] for text in self.texts], kv, llama)
        table = llama.rope.table(llama.head_dim, llama.max_position, self.dtype).to(self.device)
        read = torch.cat([part[:-1] for part in features])
        states = head.read(head(batch.tokens, read, rotary_at(table, batch.positions), attentions))
        rows: list[int] = []
        tokens: list[int] = []
        for first, text, start in zip(batch.row_starts, self.texts, self.starts, strict=True):
            # Row j of a text belongs to its token j + 1, and predicts token j + 2.
            rows += range(first + start - 2, first + len(text) - 2)
            tokens += text[start:]
        return states[torch.tensor(rows, device=self.device)], torch.tensor(tokens, device=self.device)

    def _pass(
        self, texts: Sequence[list[int]], kv: Tensor, config: LlamaConfig
    ) -> tuple[TreeBatch, list[PagedAttention]]:
        """Return a batch of whole texts and attentions storing to `kv`, `[layers, slots, 2 * kv_heads, head_dim]`."""
        rows, trees = self._rows(texts, [0] * len(texts)), HostTrees.empty(len(texts))
        batch = TreeBatch.pack(rows, trees, BLOCK_SIZE, self.device)
        layers, slopes = zip(kv, config.layer_windows, strict=True), config.slopes(self.dtype, self.device)
        return batch, [
            PagedAttention(own, batch.slots, batch.rows, self.kernels, window, slopes=slopes) for own, window in layers
        ]

    def _rows(self, texts: Sequence[list[int]], cached: Sequence[int]) -> list[TreeRow]:
        rows = zip(texts, cached, self.tables, strict=True)
        return [TreeRow(text[start:], start, table, 1) for text, start, table in rows]
