"""Block heads in the layout of speculators, as `DFlashDraftModel` and `DSparkDraftModel` read it."""

from typing import Any

from torch import Tensor

from specdec.draft_heads.formats.draft_vocab import vocabulary_maps
from specdec.draft_heads.formats.head_settings import layer_settings
from specdec.draft_heads.heads.block_head import BlockHead


def speculators_files(head: BlockHead, verifier: str | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and tensors of a block head in speculators' layout.

    Args:
        verifier: name or path of the target, from which speculators takes embedding and output matrix.

    Raises:
        ValueError: the head has a setting that the layout cannot express: causal layers, which it has only within
            sliding windows, layers without norms of queries and keys, or an output matrix of all tokens; or it is a
            Domino or DFlash2 head.
    """
    own, llama, tensors = head.config, head.llama, head.split_parameters()
    if own.domino or own.selector or own.convolution:
        raise ValueError("only DFlash and DSpark heads can be saved in speculators' layout")
    sliding = tuple(window > 0 for window in llama.layer_windows)
    if any(own.causal) and own.causal != sliding:
        raise ValueError("a head with causal layers cannot be saved in speculators' layout, whose full layers are not")
    if not llama.qk_norm:
        raise ValueError("a head without norms of queries and keys cannot be saved in speculators' layout")
    if own.draft_vocab_size == llama.vocab_size:
        raise ValueError("a head with an output matrix of all tokens cannot be saved in speculators' layout")
    del tensors["embed_tokens.weight"]
    kind = "dspark" if own.markov or own.confidence else "dflash"
    layer = layer_settings(llama) | {"model_type": "qwen3", "attention_bias": llama.attention_bias}
    del layer["architectures"]
    config = {
        "architectures": ["DSparkSpeculator" if kind == "dspark" else "DFlashSpeculator"],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": own.num_slots}],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": own.draft_vocab_size or llama.vocab_size,
        "block_size": own.block_size,
        # Ids count the inputs of layers.
        "aux_hidden_state_layer_ids": list(own.taps),
        "mask_token_id": own.mask_token,
        # Programs differ in what they take where the key is absent.
        "sample_from_anchor": own.anchor_first,
        "sliding_window_non_causal": any(sliding) and not any(own.causal),
    }
    if kind == "dspark":
        config["markov_rank"] = own.markov.rank if own.markov else 0
        config["markov_head_type"] = own.markov.kind if own.markov else "vanilla"
        config["enable_confidence_head"] = own.confidence
        config["confidence_head_with_markov"] = own.confidence_reads_token and own.markov is not None
    if own.draft_vocab_size is not None:
        tensors |= vocabulary_maps(head.draft_tokens.cpu(), llama.vocab_size)
    return config, tensors
