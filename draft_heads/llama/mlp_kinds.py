"""The kinds of MLPs that a decoder layer may have."""

from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.draft_heads.llama.mlp import GatedMLP, MLPModule


def mlp_kind(config: LlamaConfig) -> type[MLPModule]:  # noqa: ARG001
    """Return the kind of a model's MLPs, by its sizes."""
    return GatedMLP
