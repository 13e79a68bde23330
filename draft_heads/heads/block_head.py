"""Block draft heads (DFlash 2602.06036, DSpark 2607.05147, Domino 2605.29707): one pass drafts a block of positions."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.draft_heads.heads.convolved_layer import ConvolutionConfig, ConvolvedLayer
from specdec.draft_heads.heads.draft_head import Block, FeatureHead, HeadConfig, HeadForm, TargetOutput
from specdec.draft_heads.heads.edge_scorers import (
    ConfidenceHead,
    DominoConfig,
    DominoScorer,
    EdgeScorer,
    MarkovConfig,
    MarkovScorer,
    SelectorConfig,
    SelectorScorer,
)
from specdec.draft_heads.llama.linear import Linear
from specdec.draft_heads.llama.llama_layer import Attention, LlamaLayer, fused_layers
from specdec.draft_heads.llama.norm import RMSNorm
from specdec.draft_heads.llama.rope import Rotary
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.reference.elementwise import rms_norm
from specdec.kernels.types.fused import BlockWeights, FeatureWeights


@dataclass(frozen=True)
class BlockConfig(HeadConfig):
    """Shape of a block head.

    Attributes:
        taps: target layers whose inputs the head reads (k is transformers' `hidden_states[k]`), in the order of `fc`.
        block_size: rows of a block: the anchor, which is the last known token, and mask tokens.
        mask_token: id of the mask token; often an unused row of the target's embedding.
        anchor_first: whether row k predicts the token k + 1 places behind the anchor (DSpark, `sample_from_anchor`);
            else row 0 predicts nothing, and row k the token k places behind it (DFlash).
        causal: per layer, whether a row of a block sees only earlier rows of it, besides itself.
        draft_vocab_size: tokens of an output matrix of its own; None if the head uses the target's.
        markov: its Markov head (DSpark); None without one. A head has at most one of `markov`, `domino` and `selector`.
        confidence: whether it has a confidence head.
        confidence_reads_token: whether that reads the token before a slot.
        domino: its correction by a GRU (Domino); where row 0 predicts, the last row of such a head is not used.
        selector: its candidate selector (DFlash2).
        convolution: the convolutions in its layers (DFlash2).
    """

    taps: tuple[int, ...]
    block_size: int
    mask_token: int
    anchor_first: bool
    causal: tuple[bool, ...]
    draft_vocab_size: int | None = None
    markov: MarkovConfig | None = None
    confidence: bool = False
    confidence_reads_token: bool = True
    domino: DominoConfig | None = None
    selector: SelectorConfig | None = None
    convolution: ConvolutionConfig | None = None

    @property
    def num_slots(self) -> int:
        """Positions that a pass drafts, the depth of the deepest tree."""
        return self.block_size if self.anchor_first and self.domino is None else self.block_size - 1

    @property
    def windows(self) -> tuple[int, ...]:
        """Entries that a row's attention sees in each layer, 0 for all.

        In a causal layer they are the last ones of the row's path. In others, a window counts the context before the
        anchor (as speculators masks it), and all rows see the whole block besides.
        """
        pairs = zip(self.llama.layer_windows, self.causal, strict=True)
        return tuple(window if is_causal or not window else window + self.block_size for window, is_causal in pairs)

    @property
    def first_row(self) -> int:
        """The row of a block that predicts the token behind the anchor."""
        return 0 if self.anchor_first else 1

    def rows_for(self, depth: int) -> int:
        """Return the rows of a block that a pass must compute for trees of a depth.

        In a head whose layers are all causal, a row does not depend on those behind it.
        """
        cut = all(self.causal) and self.convolution is None
        return self.first_row + min(depth, self.num_slots) if cut else self.block_size


class BlockHead(FeatureHead):
    """Llama layers whose keys and values of known tokens come from the target's features, and of a block from itself.

    The feature of token i, `fc` of the target's taps, becomes a context row (`BlockForm.context`); context rows pass
    through no layer. The rows of a block, at positions from the anchor's on, go through the layers: each sees the
    context rows of tokens before the anchor, and the rows of its block. A block's own keys are scratch.

    In the paged cache, entry i holds the context row of token i - 1, as in EAGLE; the rows of a block whose anchor is
    token n - 1 lie behind the n known tokens.

    Attributes:
        draft_tokens: int64 `[draft_vocab_size]`, the target's ids of the tokens of its own output matrix, ascending.
    """

    config: BlockConfig
    draft_tokens: Tensor

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        llama, self.taps = config.llama, config.taps
        hidden, eps = llama.hidden_size, llama.rms_norm_eps
        self.fc = Linear(len(config.taps) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps)
        conv, rows = config.convolution, config.block_size
        self.layers = nn.ModuleList(
            LlamaLayer(llama, window=window) if conv is None else ConvolvedLayer(llama, conv, rows, window)
            for window in self.windows
        )
        self.norm = RMSNorm(hidden, eps)
        size = config.draft_vocab_size
        self.lm_head = None if size is None else nn.Linear(hidden, size, bias=False)
        if size is not None:
            tokens = torch.empty(size, dtype=torch.int64)
            self.register_buffer("draft_tokens", tokens if tokens.is_meta else torch.arange(size))
        markov, vocab_size = config.markov, llama.vocab_size
        self.markov_head = None if markov is None else MarkovScorer(markov, vocab_size, size or vocab_size, hidden)
        domino, selector = config.domino, config.selector
        self.domino_head = None if domino is None else DominoScorer(domino, vocab_size, hidden, self._embed)
        self.candidate_selector = None if selector is None else SelectorScorer(selector, vocab_size, hidden)
        rank = markov.rank if markov and config.confidence_reads_token else 0
        self.confidence_head = ConfidenceHead(hidden, rank) if config.confidence else None

    @property
    def windows(self) -> tuple[int, ...]:
        return self.config.windows

    @property
    def edge_scorer(self) -> EdgeScorer | None:
        """Scorer of which token follows which; None where slots are independent."""
        return self.markov_head or self.domino_head or self.candidate_selector

    def _embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.embed_tokens(tokens)
        return embedded

    def form(self, kernels: KernelSet | None) -> "BlockForm":
        return BlockForm(self, kernels)

    def project(self, normed: Tensor) -> Tensor:
        """Return keys and values in all layers, of normed features."""
        return F.linear(normed, *self.context_weights())

    def context_weights(self) -> tuple[Tensor, Tensor | None]:
        """Return the parts of all layers' products that make keys and values, one below the other."""
        queries, parts = self.llama.num_heads * self.llama.head_dim, [layer.qkv_proj for layer in self.decoder_layers]
        weight = torch.cat([part.weight[queries:] for part in parts])
        return weight, torch.cat([part.bias[queries:] for part in parts]) if self.llama.attention_bias else None

    def key_norms(self) -> Tensor | None:
        """Return the weights of the norms of keys, `[layers, head_dim]`."""
        norms: list[Tensor] = [layer.k_norm.weight for layer in self.decoder_layers if layer.k_norm is not None]
        return torch.stack(norms) if norms else None


class BlockForm(HeadForm):
    """`BlockHead` as it is called."""

    config: BlockConfig

    def __init__(self, head: BlockHead, kernels: KernelSet | None) -> None:
        # Before the layers, which give up the weights that it reads.
        beside = {} if kernels is None else {"qkv": kernels.projection(*head.context_weights())}
        self._key_norms = head.key_norms()
        self._rms_norm, self._project = rms_norm if kernels is None else kernels.rms_norm, head.project
        self.fc, self.norm = head.fc.form(kernels), head.norm.form(kernels)
        self.hidden_norm = head.hidden_norm.form(kernels)
        super().__init__(head, kernels)
        self.beside = beside
        # Context rows depend on their own token's feature alone.
        self.reach = max(self.windows) if all(self.windows) else 0
        self.block = Block(head.config.block_size, head.config.num_slots)
        self.markov_head, self.confidence_head = head.markov_head, head.confidence_head
        self.edge_scorer = head.edge_scorer
        # The target's id of each row of its own output matrix; None without one.
        self.draft_tokens = None if head.lm_head is None else head.draft_tokens

    def feature_of(self, output: TargetOutput) -> Tensor:
        """Return `fc` of the taps, `[rows, hidden_size]`, which the cache keeps of each token."""
        return self.fc(torch.cat(output.taps, -1))

    def feature_weights(self) -> FeatureWeights | None:
        return FeatureWeights(self.taps, self.fc)

    def context(self, features: Tensor) -> Tensor:
        """Return keys and values of known tokens in all layers, `[rows, layers, 2 * kv_heads, head_dim]`, keys first.

        Keys are normed, not yet rotated: a token's rotary position is its own.

        Args:
            features: `[rows, hidden_size]` of `feature_of`.
        """
        llama = self.llama
        project = self.beside.get("qkv", self._project)
        found = project(self.hidden_norm(features))
        found = found.view(len(features), llama.num_layers, 2 * llama.num_kv_heads, llama.head_dim)
        weights = self._key_norms
        if weights is None:
            return found
        keys, values = found.chunk(2, 2)
        plain = self._rms_norm(keys.reshape(-1, llama.head_dim), torch.ones_like(weights[0]), llama.rms_norm_eps)
        return torch.cat([plain.view(keys.shape) * weights[:, None], values], 2)

    def __call__(self, tokens: Tensor, rotary: Rotary, attentions: Sequence[Attention]) -> Tensor:
        """Return the normed states of blocks' rows, `[rows, hidden_size]`, which an output matrix turns into logits.

        Args:
            tokens: int64 `[rows]`, of each block the anchor, then `mask_token`.
            rotary: of the rows' positions, the anchor's and those behind it.
            attentions: one per layer, how the rows see the context and their own block: `PagedAttention` in the
                engine, `BlockAttention` over whole conversations in training.
        """
        hidden = self.embed_tokens(tokens)
        for layer, attention in zip(self.layers, attentions, strict=True):
            hidden = layer(hidden, rotary, attention)
        return self.norm(hidden)

    def confidence(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return the logits of the confidence head, `[paths]`.

        Args:
            tokens: int64 `[paths]`, the token before each slot.
            hidden: `[paths, hidden_size]`, the slots' normed states.
        """
        assert self.confidence_head is not None
        before = None
        if self.confidence_head.reads_token:
            assert self.markov_head is not None
            before = F.embedding(tokens, self.markov_head.markov_w1.weight)
        logits: Tensor = self.confidence_head(hidden, before)
        return logits

    def block_weights(self) -> BlockWeights | None:
        """Return the head's parts for drafting in one call, None where it has parts that such a call does not know."""
        config, scorer, layers = self.config, self.markov_head, fused_layers(self.mixers)
        if layers is None or config.domino or config.selector or config.convolution:
            return None
        return BlockWeights(
            embedding=self.embed_tokens.weight,
            eps=self.llama.rms_norm_eps,
            layers=layers,
            causal=config.causal,
            rows=config.block_size,
            slots=config.num_slots,
            mask_token=config.mask_token,
            hidden_norm=self.hidden_norm.weight,
            context=self.beside["qkv"],
            key_norms=self._key_norms,
            norm=self.norm.weight,
            predecessors=None if scorer is None else scorer.markov_w1.weight,
            successors=None if scorer is None else scorer.successors,
            joint=None if scorer is None else scorer.joint,
        )
