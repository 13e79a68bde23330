"""A readout that scores few tokens exactly, chosen by scores of low rank."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.draft_heads.llama.checkpoint_files import first_line
from specdec.kernels.linear import Projection
from specdec.kernels.types import Candidates


class Readout(Protocol):
    """Scores next tokens, all of them or those that are worth a look.

    Attributes:
        size: tokens scored of a row.
    """

    @property
    def size(self) -> int: ...

    def __call__(self, hidden: Tensor) -> Candidates:
        """Logits of `hidden`, `[rows, hidden_size]`."""
        ...


class MatrixReadout:
    """One product.

    Args:
        projection: to `[rows, size]`.
        vocab_size: the target's.
        tokens: int64 `[size]`, whom the rows of its matrix stand for; None for every token in order.
    """

    def __init__(self, projection: Projection, vocab_size: int, tokens: Tensor | None = None) -> None:
        self.projection, self.vocab_size, self.tokens = projection, vocab_size, tokens

    @property
    def size(self) -> int:
        return self.projection.weight.shape[0]

    def __call__(self, hidden: Tensor) -> Candidates:
        return Candidates(self.projection(hidden), self.vocab_size, self.tokens)


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
        raise ValueError(f"{file}: not a token map: {first_line(error)}") from None
    if not isinstance(ids, list) or not ids or not all(type(one) is int and 0 <= one < vocab_size for one in ids):
        raise ValueError(f"{file}: not a token map: it must be a list of token ids below {vocab_size}")
    return ids


# Tokens of a row that are scored exactly, at most.
CANDIDATES = 256
# Of fewer tokens than so many for each candidate, fewer are scored.
TOKENS_PER_CANDIDATE = 4
# Rows of a matrix that are converted at a time.
CHUNK = 8192


class CandidateReadout:
    """The best tokens by `rank` numbers of each, with their exact logits.

    The output matrix W is about U V, its best approximation of that rank. A row's scores U V h pick the candidates, and
    their rows of W score them. To a sampler the others cannot come, so chances are normalised over the candidates.

    A call reads `rank / hidden_size` of the matrix, and for each row its candidates' part: less than the whole where
    the rows times `CANDIDATES` are well below the vocabulary.

    Args:
        readout: the whole matrix, of all tokens or some.
        rank: of the approximation, up to the matrix's columns, where it is the matrix itself.

    Raises:
        ValueError: a rank outside that.
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
        self.down = Projection(basis)
        self.up = Projection(weight @ basis.T)

    def __call__(self, hidden: Tensor) -> Candidates:
        """Logits of `hidden`, `[rows, hidden_size]`, at `[rows, size]` tokens."""
        best = self.up(self.down(hidden)).topk(self.size, sorted=False).indices
        # Rows are gathered several times as fast as by an index, on a CPU.
        rows = F.embedding(best, self.weight)
        scores = torch.bmm(rows, hidden[:, :, None]).squeeze(-1)
        return Candidates(scores, self.vocab_size, best if self.tokens is None else self.tokens[best])


def leading_directions(matrix: Tensor, rank: int) -> Tensor:
    """float64 `[rank, columns]`, the right singular vectors of the largest singular values, orthonormal.

    They are eigenvectors of the small matrix of the columns' inner products.
    """
    columns = matrix.shape[1]
    inner = torch.zeros(columns, columns, dtype=torch.float64, device=matrix.device)
    for start in range(0, len(matrix), CHUNK):
        part = matrix[start : start + CHUNK].to(torch.promote_types(matrix.dtype, torch.float32))
        inner += part.T @ part
    vectors: Tensor = torch.linalg.eigh(inner).eigenvectors
    return vectors[:, -rank:].T.contiguous()
