"""Readouts: from a head's states to scores of all tokens, of frequent ones, or of a few preselected ones."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.draft_heads.llama.checkpoint_files import first_line
from specdec.kernels.types.product import Product
from specdec.kernels.types.types import Candidates


class Readout(Protocol):
    """Scores next tokens, all of them or the promising ones.

    Attributes:
        size: number of tokens scored per row.
    """

    @property
    def size(self) -> int: ...

    def __call__(self, hidden: Tensor) -> Candidates:
        """Return the logits of states, `[rows, hidden_size]`."""
        ...


class MatrixReadout:
    """A readout by one matrix product.

    Args:
        projection: the output matrix, to `[rows, size]`.
        vocab_size: the target's vocabulary size.
        tokens: int64 `[size]`, the tokens of the matrix's rows; None for every token in order.
    """

    def __init__(self, projection: Product, vocab_size: int, tokens: Tensor | None = None) -> None:
        self.projection, self.vocab_size, self.tokens = projection, vocab_size, tokens

    @property
    def size(self) -> int:
        return self.projection.size

    def __call__(self, hidden: Tensor) -> Candidates:
        return Candidates(self.projection(hidden), self.vocab_size, self.tokens)


def trimmed_readout(readout: MatrixReadout, draft_vocab: int | Path, kept: Collection[int] = ()) -> MatrixReadout:
    """Return a readout of frequent tokens only (FR-Spec, Zhao et al. 2025).

    Args:
        draft_vocab: number of tokens, taken from the start of the readout's, since low ids of a byte-pair vocabulary
            were merged first and are frequent; or a token map, a file that names the tokens.
        kept: tokens that stay in any case, such as those that end an output.

    Raises:
        ValueError: fewer than one token or more than there are, or an unusable token map.
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
    # A tokenizer may have tokens that the model has no rows for.
    wanted[[token for token in kept if token < readout.vocab_size]] = True
    rows = wanted.to(own.device)[own].nonzero().flatten()
    if not len(rows):
        raise ValueError(f"draft_vocab {draft_vocab} names none of the {readout.size} tokens that can be drafted")
    return MatrixReadout(readout.projection.like(weight[rows]), readout.vocab_size, own[rows])


def read_token_map(file: Path, vocab_size: int) -> list[int]:
    """Read token ids in any order from a JSON list, or from a list or tensor saved by torch, as SGLang does.

    Raises:
        ValueError: no such file, or it holds something else.
    """
    if not file.is_file():
        raise ValueError(f"draft_vocab {str(file)!r} is neither a number nor a file; say how many tokens, or which")
    try:
        if file.suffix == ".json":
            ids = json.loads(file.read_text(encoding="utf-8"))
        else:
            ids = torch.as_tensor(torch.load(file, map_location="cpu", weights_only=True)).tolist()
    except Exception as error:  # torch raises many kinds
        raise ValueError(f"{file}: not a token map: {first_line(error)}") from None
    if not isinstance(ids, list) or not ids or not all(type(one) is int and 0 <= one < vocab_size for one in ids):
        raise ValueError(f"{file}: not a token map: it must be a list of token ids below {vocab_size}")
    return ids


# Most tokens that are scored exactly per row.
CANDIDATES = 256
# At least this many tokens per candidate: of a small vocabulary fewer candidates are scored.
TOKENS_PER_CANDIDATE = 4
# Rows of a matrix that are converted to float32 at a time.
CHUNK = 8192


class CandidateReadout:
    """A readout that preselects candidates by a low-rank approximation and scores only those exactly.

    The output matrix W is about U V, its best approximation of that rank. The scores U V h pick a row's candidates, and
    their rows of W score them. Other tokens get no probability: draft probabilities are normalised over the candidates.

    A call reads `rank / hidden_size` of the matrix, and the candidates' part for each row. That is less than the whole
    matrix if the rows times `CANDIDATES` are well below the vocabulary size.

    Args:
        readout: the whole matrix, of all tokens or some.
        rank: rank of the approximation, at most the matrix's columns, where the approximation is exact.

    Raises:
        ValueError: the rank is out of this range.
    """

    def __init__(self, readout: MatrixReadout, rank: int) -> None:
        weight = readout.projection.weight
        tokens, width = weight.shape
        if not 1 <= rank <= width:
            raise ValueError(f"draft_rank is {rank}; it must be from 1 to {width}, the size of the states it reads")
        assert readout.projection.bias is None
        self.weight, self.tokens, self.vocab_size = weight, readout.tokens, readout.vocab_size
        self.size = min(CANDIDATES, -(-tokens // TOKENS_PER_CANDIDATE))
        basis = leading_directions(weight, rank).to(weight.dtype)
        self.down = readout.projection.like(basis)
        self.up = readout.projection.like(weight @ basis.T)

    def __call__(self, hidden: Tensor) -> Candidates:
        """Return the logits of states, `[rows, hidden_size]`, at `[rows, size]` tokens."""
        best = self.up(self.down(hidden)).topk(self.size, sorted=False).indices
        # On a CPU this gathers rows several times as fast as indexing.
        rows = F.embedding(best, self.weight)
        scores = torch.bmm(rows, hidden[:, :, None]).squeeze(-1)
        return Candidates(scores, self.vocab_size, best if self.tokens is None else self.tokens[best])


def leading_directions(matrix: Tensor, rank: int) -> Tensor:
    """Return the right singular vectors of the largest singular values, float64 `[rank, columns]`, orthonormal.

    They are eigenvectors of the small matrix of the columns' inner products.
    """
    columns = matrix.shape[1]
    inner = torch.zeros(columns, columns, dtype=torch.float64, device=matrix.device)
    for start in range(0, len(matrix), CHUNK):
        part = matrix[start : start + CHUNK].to(torch.promote_types(matrix.dtype, torch.float32))
        inner += part.T @ part
    vectors: Tensor = torch.linalg.eigh(inner).eigenvectors
    return vectors[:, -rank:].T.contiguous()
