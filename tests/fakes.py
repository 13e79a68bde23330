"""Random Llamas and heads on disk, and a drafter that drafts at random."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import LlamaConfig as HFLlamaConfig
from transformers import LlamaForCausalLM, PretrainedConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from specdec.draft_heads.drafting.drafter import DraftRow, NoDrafter
from specdec.draft_heads.formats.head_kinds import KINDS
from specdec.draft_heads.heads.block_head import BlockConfig, BlockHead
from specdec.draft_heads.heads.convolved_layer import ConvolutionConfig
from specdec.draft_heads.heads.eagle import EagleConfig, EagleHead
from specdec.draft_heads.heads.eagle3 import Eagle3Config, Eagle3Head
from specdec.draft_heads.heads.edge_scorers import DominoConfig, MarkovConfig, SelectorConfig
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.kernels.types.draft_trees import HostTrees
from specdec.kernels.types.tree import ROOT, DraftTree
from specdec.kernels.types.upload import Packet

Model = TypeVar("Model", bound=PreTrainedModel)
TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_random_llama(folder: Path, seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """Write a random float64 Llama as a checkpoint. Its logits are far enough apart that no two tokens nearly tie."""
    return _saved(folder, seed, LlamaForCausalLM, HFLlamaConfig(**{**TINY, "initializer_range": 0.3, **overrides}))


def save_random_qwen3(folder: Path, seed: int = 0, **overrides: Any) -> Qwen3ForCausalLM:
    """Write a random Qwen3, which norms queries and keys; see `save_random_llama`."""
    return _saved(folder, seed, Qwen3ForCausalLM, Qwen3Config(**{**TINY, "initializer_range": 0.3, **overrides}))


def _saved(folder: Path, seed: int, kind: type[Model], config: PretrainedConfig) -> Model:
    torch.manual_seed(seed)
    model = kind(config).to(torch.float64)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "q_norm.weight", "k_norm.weight")):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return model.eval()


def save_shallow_llama(folder: Path, target: LlamaForCausalLM, **overrides: Any) -> LlamaForCausalLM:
    """The first layer of a target with its embedding and output matrix: a small model that often guesses right."""
    config = HFLlamaConfig(**{**target.config.to_dict(), "num_hidden_layers": 1, **overrides})
    model = LlamaForCausalLM(config).to(torch.float64)
    model.load_state_dict(target.state_dict(), strict=False)
    model.save_pretrained(folder)
    return model.eval()


def save_random_head(folder: Path, seed: int = 0, fc_bias: bool = True, **overrides: Any) -> EagleHead:
    """A random head for `save_random_llama`'s model."""
    torch.manual_seed(seed)
    config = LlamaConfig.from_json({**TINY, "num_hidden_layers": 1, **overrides})
    head = EagleHead(EagleConfig(config, fc_bias))
    for parameter in head.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    KINDS["eagle"].save(head, folder, {})
    return head


def save_random_eagle3(folder: Path, seed: int = 0, draft_vocab_size: int = 60, **overrides: Any) -> Eagle3Head:
    """A random EAGLE-3 head for `save_random_llama`'s model, which proposes some tokens only."""
    torch.manual_seed(seed)
    config = LlamaConfig.from_json({**TINY, "num_hidden_layers": 1, **overrides})
    taps = (0, 1, 2)
    head = Eagle3Head(Eagle3Config(config, taps, config.hidden_size, draft_vocab_size))
    for parameter in head.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    head.draft_tokens.copy_(torch.randperm(config.vocab_size)[:draft_vocab_size].sort().values)
    KINDS["eagle3"].save(head, folder, {})
    return head


def save_random_block(
    folder: Path, kind: str, seed: int = 0, taps: tuple[int, ...] = (0, 2), **overrides: Any
) -> BlockHead:
    """A random block head for `save_random_llama`'s model: DFlash, causal; DSpark over some tokens; Domino; DFlash2.

    Args:
        kind: "dflash", "domino", "dflash2", "dspark", or a kind of DSpark's Markov head.
    """
    torch.manual_seed(seed)
    config = LlamaConfig.from_json({**TINY, "num_hidden_layers": 2, **overrides})
    plain = kind in ("dflash", "dflash2")
    is_dspark = not plain and kind != "domino"
    parts: dict[str, Any] = {}
    if kind == "domino":
        parts = {"domino": DominoConfig(8, 12)}
    elif kind == "dflash2":
        parts = {"selector": SelectorConfig(8, 9), "convolution": ConvolutionConfig(2, 8)}
    elif is_dspark:
        parts = {"markov": MarkovConfig(8, "vanilla" if kind == "dspark" else kind), "confidence": True}
    head = BlockHead(
        BlockConfig(
            config,
            taps=taps,
            block_size=5,
            mask_token=config.vocab_size - 1,
            anchor_first=not plain,
            causal=(kind == "dflash",) * config.num_layers,
            draft_vocab_size=60 if kind == "dspark" else None,
            **parts,
        )
    )
    for parameter in head.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    if kind == "dspark":
        head.draft_tokens.copy_(torch.randperm(config.vocab_size)[:60].sort().values)
    KINDS["dspark" if is_dspark else kind].save(head, folder, {})
    return head


def edit_json(file: Path, **changes: Any) -> None:
    """Set keys of a JSON object on disk; None removes one."""
    values = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


class RandomDrafter(NoDrafter):
    """Random trees of random tokens."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self.vocab_size = vocab_size
        self.random = random.Random(seed)

    def propose(self, rows: Sequence[DraftRow], packet: Packet | None = None) -> HostTrees:  # noqa: ARG002
        return HostTrees([self.tree(row) if row.num_nodes else DraftTree() for row in rows])

    def tree(self, row: DraftRow) -> DraftTree:
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        taken = set()
        for _ in range(self.random.randint(0, row.num_nodes)):
            parent = self.random.randint(ROOT, len(tokens) - 1)
            depth = 1 if parent == ROOT else depths[parent] + 1
            token = self.random.randrange(self.vocab_size)
            if depth <= row.max_depth and (parent, token) not in taken:
                taken.add((parent, token))
                tokens.append(token)
                parents.append(parent)
                depths.append(depth)
        return DraftTree(tuple(tokens), tuple(parents))
