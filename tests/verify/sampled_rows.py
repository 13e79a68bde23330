"""Rows to verify as pairs of a tree and a request."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.types.draft_trees import HostTrees
from specdec.kernels.types.tree import DraftTree
from specdec.kernels.types.types import Acceptance
from specdec.kernels.types.upload import Packet
from specdec.verify.sampling import Context
from specdec.verify.transforms import NodeRows
from specdec.verify.verifier import Verifier, node_rows


class SampledRow(NamedTuple):
    """A request and the draft tree under its last token."""

    tree: DraftTree
    context: Context


def verify(verifier: Verifier, rows: Sequence[SampledRow], logits: Tensor) -> list[Acceptance]:
    packet = Packet(logits.device)
    prepared = verifier.prepare(HostTrees([row.tree for row in rows]), [row.context for row in rows], packet)
    packet.send()
    return prepared(logits).read()


def nodes_of(rows: Sequence[SampledRow]) -> list[NodeRows]:
    return node_rows(HostTrees([row.tree for row in rows]), [row.context for row in rows], torch.device("cpu"))
