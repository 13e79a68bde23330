"""A readout of frequent tokens alone."""

import json
from collections.abc import Collection
from pathlib import Path

import torch

from specdec.draft_heads.readout import MatrixReadout
from specdec.kernels.linear import Projection


def trimmed_readout(readout: MatrixReadout, draft_vocab: int | Path, kept: Collection[int] = ()) -> MatrixReadout:
    """The readout's own rows of frequent tokens (FR-Spec, Zhao et al. 2025).

    Args:
        draft_vocab: how many of the readout's tokens, its first ones: in a vocabulary of byte pairs low ids were merged
            first and so are frequent; or a token map, a file that names them.
        kept: tokens that stay in any case, such as those that end an output.

    Raises:
        ValueError: fewer than one or more than there are, or an unusable token map.
    """
    weight = readout.projection.weight
    own = readout.tokens if readout.tokens is not None else torch.arange(readout.size, device=weight.device)
    if isinstance(draft_vocab, Path):
        chosen = torch.tensor(read_token_map(draft_vocab, readout.vocab_size))
    elif 1 <= draft_vocab <= readout.size:
        chosen = own[:draft_vocab].cpu()
    else:
        raise ValueError(f"draft_vocab is {draft_vocab}; it must be from 1 to {readout.size}, as many as are scored")
    wanted = torch.zeros(readout.vocab_size, dtype=torch.bool)
    wanted[chosen] = True
    # A tokenizer may know tokens that the model has no rows for.
    wanted[[token for token in kept if token < readout.vocab_size]] = True
    rows = wanted.to(own.device)[own].nonzero().flatten()
    if not len(rows):
        raise ValueError(f"draft_vocab {draft_vocab} names none of the {readout.size} tokens that can be drafted")
    return MatrixReadout(Projection(weight[rows]), readout.vocab_size, own[rows])


def read_token_map(file: Path, vocab_size: int) -> list[int]:
    """Token ids in any order: a JSON list, or a list or tensor that torch has saved, as SGLang's token maps are.

    Raises:
        ValueError: no such file, or something else in it.
    """
    if not file.is_file():
        raise ValueError(f"draft_vocab {str(file)!r} is neither a number nor a file; say how many tokens, or which")
    try:
        if file.suffix == ".json":
            ids = json.loads(file.read_text(encoding="utf-8"))
        else:
            ids = torch.as_tensor(torch.load(file, map_location="cpu", weights_only=True)).tolist()
    except Exception as error:  # torch raises many kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{file}: not a token map: {reason}") from None
    if not isinstance(ids, list) or not ids or not all(type(one) is int and 0 <= one < vocab_size for one in ids):
        raise ValueError(f"{file}: not a token map: it must be a list of token ids below {vocab_size}")
    return ids
