"""Input sizes of the GPU benchmarks."""

from dataclasses import dataclass

import torch

from specdec import DraftShape

MIB = 2**20


@dataclass(frozen=True)
class Sizes:
    """A model, the steps that it is asked to take, and how long a call is timed.

    Attributes:
        layers: of the cache in which entries are moved; attention is of one.
        draft_vocabulary: of a head with a vocabulary of its own.
        tree: of the draft trees, all of them full.
        batches, contexts: of the attention, each with each; entries in the cache before the step.
        chunk, chunk_batches: rows of a prompt's chunk, and how many prompts.
        rows: of norms, activation and rotary embedding.
        sampled_rows: whose token is drawn.
        drafted_rows: whose best children are asked for.
        moves: requests whose accepted path is moved, and blocks that are copied.
        walks: trees walked.
        copies: bytes of the plain copies.
        rounds: in each of which every call is timed.
        iterations: of a call in a round, at most.
        flex_batches, flex_contexts: with which FlexAttention is a peer. It is compiled for each alone, which serves
            it best and takes some seconds.
        flex_backend: of `torch.compile` for it. On a CPU, inductor takes half a minute.
    """

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    draft_vocabulary: int
    block_size: int
    dtype: torch.dtype
    tree: DraftShape
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    chunk: int
    chunk_batches: tuple[int, ...]
    rows: tuple[int, ...]
    sampled_rows: tuple[int, ...]
    drafted_rows: tuple[int, ...]
    moves: tuple[int, ...]
    walks: tuple[int, ...]
    copies: tuple[int, ...]
    rounds: int
    iterations: int
    flex_batches: tuple[int, ...]
    flex_contexts: tuple[int, ...]
    flex_backend: str


# No step has room for more than 16 chunks of 512 rows.
LLAMA_8B = Sizes(
    heads=32,
    kv_heads=8,
    head_dim=128,
    hidden=4096,
    intermediate=14336,
    layers=32,
    vocabulary=128256,
    draft_vocabulary=32000,
    block_size=16,
    dtype=torch.bfloat16,
    tree=DraftShape(6, 10, 60),
    batches=(1, 4, 16, 64),
    contexts=(128, 1024, 4096, 16384),
    chunk=512,
    chunk_batches=(1, 4, 16),
    rows=(1, 61, 976, 8192),
    sampled_rows=(61, 976),
    drafted_rows=(10, 160),
    moves=(1, 16, 64),
    walks=(1, 16, 64),
    copies=(64 * MIB, 256 * MIB, 1024 * MIB, 2048 * MIB),
    rounds=7,
    iterations=20,
    flex_batches=(1, 16),
    flex_contexts=(1024, 16384),
    flex_backend="inductor",
)
# For a CPU: the kernels are interpreted, and in float32, as Triton's interpreter is wrong about bfloat16.
TINY = Sizes(
    heads=4,
    kv_heads=2,
    head_dim=16,
    hidden=64,
    intermediate=96,
    layers=2,
    vocabulary=2100,
    draft_vocabulary=300,
    block_size=8,
    dtype=torch.float32,
    tree=DraftShape(3, 4, 9),
    batches=(2,),
    contexts=(21,),
    chunk=11,
    chunk_batches=(1,),
    rows=(3,),
    sampled_rows=(2,),
    drafted_rows=(2,),
    moves=(2,),
    walks=(2,),
    copies=(MIB,),
    rounds=1,
    iterations=1,
    flex_batches=(1, 2),
    flex_contexts=(21,),
    flex_backend="eager",
)
