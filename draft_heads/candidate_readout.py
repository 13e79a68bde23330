"""A readout that scores few tokens exactly, chosen by scores of low rank."""

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.draft_heads.readout import MatrixReadout
from specdec.kernels.linear import Projection
from specdec.verify.sampler import Candidates

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
