"""Draft vocabularies: the tokens that a head can propose, from the maps in its checkpoint and back."""

import torch
from torch import Tensor

from specdec.draft_heads.llama.checkpoint_files import CheckpointError


def draft_tokens(d2t: Tensor | None, t2d: Tensor | None, draft_vocab: int, vocab_size: int) -> Tensor | None:
    """Return the tokens of an EAGLE-3 head's draft vocabulary, int64 `[draft_vocab]`, ascending; None for all tokens.

    Args:
        d2t: int64 `[draft_vocab]`, target id minus draft id.
        t2d: bool `[vocab_size]`, which of the target's tokens have a draft id.

    Raises:
        CheckpointError: the maps are missing, of another size, or contradict each other.
    """
    if d2t is None and t2d is None and draft_vocab == vocab_size:
        return None
    if d2t is None:
        raise CheckpointError(f"missing tensor 'd2t', which a draft vocabulary of {draft_vocab} tokens needs")
    if list(d2t.shape) != [draft_vocab]:
        raise CheckpointError(f"d2t has shape {list(d2t.shape)}, config.json says draft_vocab_size {draft_vocab}")
    if t2d is not None and list(t2d.shape) != [vocab_size]:
        raise CheckpointError(f"t2d has shape {list(t2d.shape)}, config.json says vocab_size {vocab_size}")
    tokens = d2t.long() + torch.arange(draft_vocab)
    known = None if t2d is None else t2d.bool().nonzero().flatten()
    agrees = known is None or torch.equal(tokens, known)
    if agrees and (tokens.diff() > 0).all() and tokens[0] >= 0 and tokens[-1] < vocab_size:
        return tokens if draft_vocab != vocab_size else None
    found = f"d2t, {d2t[0]} to {d2t[-1]}, must hold target id minus draft id"
    if (d2t.diff() > 0).all():
        raise CheckpointError(f"{found}; it holds ids themselves")
    if known is not None and len(known) != draft_vocab:
        raise CheckpointError(f"t2d keeps {len(known)} tokens, config.json says draft_vocab_size {draft_vocab}")
    if known is not None and not agrees and torch.equal(tokens.sort().values, known):
        raise CheckpointError("d2t names the tokens of t2d in another order; sort it, with the rows of lm_head.weight")
    if not agrees:
        raise CheckpointError(f"d2t and t2d name different tokens; {found}")
    raise CheckpointError(f"{found}, which makes an ascending map into {vocab_size} tokens; it does not")


def mapped_tokens(token_map: Tensor, vocab_size: int) -> Tensor:
    """Return the target's ids in vLLM's `token_map`, int64, in its order.

    Raises:
        CheckpointError: an id that the target does not have, or one that comes twice.
    """
    tokens = token_map.long()
    if tokens.ndim != 1 or not len(tokens) or tokens.min() < 0 or tokens.max() >= vocab_size:
        raise CheckpointError(f"token_map holds a value that is no token id; ids are 0 to {vocab_size - 1}")
    if (tokens.sort().values.diff() == 0).any():
        raise CheckpointError("token_map names a token twice")
    return tokens


def vocabulary_maps(tokens: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Return `t2d` and `d2t` of the tokens of a draft vocabulary (int64, ascending)."""
    known = torch.zeros(vocab_size, dtype=torch.bool)
    known[tokens] = True
    return {"t2d": known, "d2t": tokens - torch.arange(len(tokens))}
