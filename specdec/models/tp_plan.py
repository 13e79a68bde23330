"""Tensor-parallel plans: how each weight is split over ranks, in transformers' words."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.draft_heads.llama.checkpoint_files import CheckpointError, section
from specdec.draft_heads.llama.kv_scheme import is_kv_scale
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.draft_heads.llama.mlp import GatedMLP, mlp_kind
from specdec.kernels.types.adapters import LowRank
from specdec.kernels.types.integers import ceil_div

# transformers' `base_model_tp_plan` of the families that this engine serves, with the lm_head's and without the MLP's,
# which is `GatedMLP.plan`. Theirs has no entry for the embedding; the word here is theirs for a vocabulary that is
# split.
OUTSIDE_MLP = {
    "embed_tokens": "embedding_rowwise",
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
    "layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
    "layers.*.self_attn.o_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}
# The dimension of a weight `[outputs, inputs]` that each word splits; None for a weight that every rank holds whole.
# Where inputs are split, the ranks' outputs are summed.
BY_OUTPUTS, BY_INPUTS = 0, 1
WORDS = {
    "colwise": BY_OUTPUTS,
    "colwise_rep": BY_OUTPUTS,
    "colwise_gather_output": BY_OUTPUTS,
    "embedding_rowwise": BY_OUTPUTS,
    "rowwise": BY_INPUTS,
    "replicate": None,
    "replicated_with_grad_allreduce": None,
}
# Weights that are split together or not at all, and how.
ATTENTION = {**dict.fromkeys(("q_proj", "k_proj", "v_proj"), BY_OUTPUTS), "o_proj": BY_INPUTS}
VOCABULARY = {"embed_tokens": BY_OUTPUTS, "lm_head": BY_OUTPUTS}
MLP_PREFIX = "layers.*.mlp."


def tp_plan(kind: type[GatedMLP] = GatedMLP) -> dict[str, str]:
    """Return the words of a model with a kind of MLP, by patterns of module names."""
    return OUTSIDE_MLP | {f"{MLP_PREFIX}{name}": word for name, word in kind.plan.items()}


class Span(NamedTuple):
    """Part of a dimension: `start .. stop - 1` of `total`."""

    start: int
    stop: int
    total: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class TPPlan:
    """A plan, checked.

    Args:
        words: by patterns of module names; of a module's patterns the first counts, and a module without one is
            replicated.
        kind: of the model's MLPs.

    Attributes:
        attention, mlp, vocabulary: whether these weights are split.

    Raises:
        ValueError: an unknown word, or one that does not fit the words beside it.
    """

    def __init__(self, words: Mapping[str, str], kind: type[GatedMLP] = GatedMLP) -> None:
        self.words, self.kind = words, kind
        for pattern, word in words.items():
            if word not in WORDS:
                raise ValueError(f"the model's tp plan has {pattern!r}: {word!r}; known words are {', '.join(WORDS)}")
        mlp = {name: WORDS[word] for name, word in kind.plan.items()}
        self.attention = self._splits(ATTENTION, "layers.0.self_attn.")
        self.mlp, self.vocabulary = self._splits(mlp, MLP_PREFIX), self._splits(VOCABULARY, "")

    def word(self, module: str) -> str:
        """Return the word of a module."""
        return next((word for pattern, word in self.words.items() if fnmatchcase(module, pattern)), "replicate")

    def _splits(self, ways: Mapping[str, int | None], prefix: str) -> bool:
        found = {name: self.word((prefix + name).replace("*", "0")) for name in ways}
        if all(WORDS[word] is None for word in found.values()):
            return False
        for name, way in ways.items():
            if WORDS[found[name]] != way:
                words = ", ".join(f"{name} {word!r}" for name, word in found.items())
                raise ValueError(
                    f"the model's tp plan has {words}; these weights are split together, or all replicated"
                )
        return True


@dataclass(frozen=True)
class Shard:
    """One rank's part of a model.

    Attributes:
        rank, size: number of the rank, and of ranks, among those that split the same weights.
        whole: sizes of the model.
        layers: layers of the part.
    """

    rank: int
    size: int
    whole: LlamaConfig
    plan: TPPlan
    layers: Span

    @classmethod
    def of(cls, whole: LlamaConfig, rank: int, size: int, plan: TPPlan, stage: int = 0, num_stages: int = 1) -> "Shard":
        """Return a rank's part.

        Args:
            stage: pipeline stage of the rank; its layers are those of the part.

        Raises:
            ValueError: heads or neurons cannot be shared among so many ranks, or layers among so many stages.
        """
        heads, kv_heads = whole.num_heads, whole.num_kv_heads
        if plan.attention and heads % size:
            raise ValueError(f"tensor_parallel_size is {size}; it must divide the model's {heads} attention heads")
        if plan.attention and kv_heads % size and size % kv_heads:
            raise ValueError(
                f"tensor_parallel_size is {size}; it must divide the model's {kv_heads} key-value heads, or be a "
                "multiple of them"
            )
        if plan.mlp and whole.intermediate_size % size:
            neurons = whole.intermediate_size
            raise ValueError(f"tensor_parallel_size is {size}; it must divide the model's {neurons} MLP neurons")
        return cls(rank, size, whole, plan, stage_layers(whole.num_layers, stage, num_stages))

    @property
    def layer_range(self) -> range:
        """Layers of the part."""
        return range(self.layers.start, self.layers.stop)

    @property
    def is_first(self) -> bool:
        """True if the part begins with the embedding."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """True if the part ends with the last norm and the output matrix."""
        return self.layers.stop == self.layers.total

    @property
    def holds_embedding(self) -> bool:
        """True if the part has the embedding, which may be the output matrix as well."""
        return self.is_first or (self.is_last and self.whole.tie_word_embeddings)

    @property
    def heads(self) -> Span:
        """Attention heads of the rank."""
        return self._part(self.whole.num_heads, is_split=self.plan.attention)

    @property
    def kv_heads(self) -> Span:
        """Key-value heads of the rank. Where there are fewer heads than ranks, several ranks hold copies of one."""
        count = self.whole.num_kv_heads
        if count >= self.size or not self.plan.attention:
            return self._part(count, is_split=self.plan.attention)
        own = self.rank * count // self.size
        return Span(own, own + 1, count)

    @property
    def neurons(self) -> Span:
        """Neurons of the rank's MLPs."""
        return self._part(self.whole.intermediate_size, is_split=self.plan.mlp)

    @property
    def vocab(self) -> Span:
        """Tokens of the rank."""
        return self._part(self.whole.vocab_size, is_split=self.plan.vocabulary)

    @property
    def config(self) -> LlamaConfig:
        """Sizes of the part: its own layers, heads and neurons, and the whole vocabulary."""
        return replace(
            self.whole,
            num_layers=self.layers.size,
            windows=self.whole.windows[self.layers.start : self.layers.stop],
            alibi_slopes=self.whole.alibi_slopes[self.heads.start : self.heads.stop],
            num_heads=self.heads.size,
            num_kv_heads=self.kv_heads.size,
            intermediate_size=self.neurons.size,
        )

    def check_groups(self, group: int | None) -> None:
        """Check that no two ranks share a group of inputs whose weights are rounded by one scale.

        Args:
            group: inputs of a group; None where weights are not rounded.

        Raises:
            ValueError: a weight of which a rank's part ends within a group.
        """
        if group is None:
            return
        summed = [f"{MLP_PREFIX}{name}" for name, word in self.plan.kind.plan.items() if WORDS[word] == BY_INPUTS]
        splits = ((self.plan.attention, ["layers.0.self_attn.o_proj"]), (self.plan.mlp, summed))
        for module in (module for is_split, modules in splits if is_split for module in modules):
            span = self._span(module)
            if (size := span.total // self.size) % group:
                raise ValueError(
                    f"tensor_parallel_size is {self.size}, and a rank has {size} of the {span.total} inputs of "
                    f"{module.rpartition('.')[2]}, which quantization 'q8' rounds in groups of {group}; lower it until "
                    f"{group} divides a rank's part, or use quantization 'none'"
                )

    def own_name(self, name: str) -> str | None:
        """Return the name of a checkpoint's tensor in the part, which counts its own layers from 0; None if not held.

        Args:
            name: in a checkpoint, without its `model.`.
        """
        kind, _, rest = name.partition(".")
        if kind == "layers":
            layer, _, rest = rest.partition(".")
            place = int(layer) - self.layers.start
            return f"layers.{place}.{rest}" if 0 <= place < self.layers.size else None
        return name if (self.holds_embedding if kind == "embed_tokens" else self.is_last) else None

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """Return the rank's part of a tensor, without a copy.

        Where the ranks' outputs are summed, rank 0 has the bias and the others have zeros.

        Args:
            name: in a checkpoint, without its `model.`.

        Raises:
            CheckpointError: a tensor of another size than config.json says.
        """
        if is_kv_scale(name):
            # One of all heads together, or one of each.
            span = self.kv_heads
            return tensor.flatten()[span.start : span.stop] if tensor.numel() == span.total > 1 else tensor
        module, _, kind = name.rpartition(".")
        dim = WORDS[self.plan.word(module)]
        if dim is None:
            return tensor
        if kind == "bias" and dim == BY_INPUTS:
            return tensor if self.rank == 0 else torch.zeros_like(tensor)
        span = self._span(module)
        if dim >= tensor.ndim or tensor.shape[dim] != span.total:
            shape = list(tensor.shape)
            raise CheckpointError(f"{name} has shape {shape}, config.json says {span.total} in dimension {dim}")
        return tensor.narrow(dim, span.start, span.size)

    def cut_low_rank(self, module: str, update: LowRank) -> LowRank:
        """Return the rank's part of an update of low rank: `up` is split by columns of the weight, or `down` by inputs.

        Args:
            module: the weight's, in a checkpoint, without its `model.`.
        """
        way, name = WORDS[self.plan.word(module)], f"{module}.weight"
        down, up = update
        return LowRank(
            self.cut(name, down) if way == BY_INPUTS else down,
            self.cut(name, up) if way == BY_OUTPUTS else up,
        )

    def _span(self, module: str) -> Span:
        """Return the part of a module's split dimension."""
        last = module.rpartition(".")[2]
        if last in ATTENTION:
            heads, dim = self.heads if last in ("q_proj", "o_proj") else self.kv_heads, self.whole.head_dim
            return Span(dim * heads.start, dim * heads.stop, dim * heads.total)
        if any(fnmatchcase(module, f"{MLP_PREFIX}{name}") for name in self.plan.kind.plan):
            return self.neurons
        if last in VOCABULARY:
            return self.vocab
        raise CheckpointError(f"the model's tp plan splits {module}, which this engine cannot split")

    def _part(self, count: int, *, is_split: bool) -> Span:
        """Return one of `size` contiguous parts, of which the last may be smaller; all if it is not split."""
        chunk = ceil_div(count, self.size) if is_split else count
        start = self.rank * chunk if is_split else 0
        return Span(min(start, count), min(start + chunk, count), count)


def stage_layers(num_layers: int, stage: int, num_stages: int) -> Span:
    """Return the layers of a pipeline stage. Where they are not equal, the last stages, with the logits, have fewer.

    Raises:
        ValueError: fewer layers than stages.
    """
    if num_stages > num_layers:
        raise ValueError(f"pipeline_parallel_size is {num_stages}; the model has {num_layers} layers; lower it")
    least, more = divmod(num_layers, num_stages)
    start = stage * least + min(stage, more)
    return Span(start, start + least + (stage < more), num_layers)


def plan_of(settings: Mapping[str, object], sizes: LlamaConfig) -> TPPlan:
    """Return the model's plan, from `base_model_tp_plan` of its config.json; `tp_plan` gives the words it leaves out.

    Args:
        settings: the config.json.
        sizes: the model's.

    Raises:
        CheckpointError: a plan that is no object.
        ValueError: see `TPPlan`.
    """
    given = section(settings, "base_model_tp_plan")
    own = {name.removeprefix("model."): str(word) for name, word in given.items()}
    kind = mlp_kind(sizes)
    return TPPlan({**own, **{name: word for name, word in tp_plan(kind).items() if name not in own}}, kind)
