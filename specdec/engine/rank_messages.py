"""Messages of the first rank to the others, and their answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from specdec.config import EngineConfig
from specdec.execution.step_codec import SentOrder
from specdec.kernels.draft_trees import HostTrees
from specdec.kernels.tree import TreeRow


class Join(NamedTuple):
    """First message: load the target.

    Attributes:
        store: file through which the ranks find each other.
        timeout: seconds of a collective operation.
    """

    config: EngineConfig
    rank: int
    store: str
    timeout: float


class LoadDrafts(NamedTuple):
    """Load the draft model.

    Attributes:
        kept_tokens: tokens that can always be drafted.
    """

    kept_tokens: frozenset[int]


class Allocate(NamedTuple):
    """Make a worker with a cache of so many blocks, in place of an earlier one."""

    num_blocks: int
    num_host_blocks: int


class LoadUpdate(NamedTuple):
    """Load another head beside the present one; see `WorkerMaker.load_draft`."""

    folder: Path
    kept_tokens: frozenset[int]


class UseUpdate(NamedTuple):
    """Draft with the head that was loaded last, from the next step on."""


class Refusal(NamedTuple):
    """Answer to `LoadUpdate`: the head does not fit, and the rank goes on with the present one."""

    reason: str


class RunDummy(NamedTuple):
    """Run a pass that nothing reads."""

    rows: Sequence[TreeRow]
    trees: HostTrees


class Failure(NamedTuple):
    """Last message of a follower that fails."""

    reason: str


Message = Join | LoadDrafts | Allocate | LoadUpdate | UseUpdate | RunDummy | SentOrder
# Answer to `Join`, twice: when the rank is there and when it has loaded; and to `Allocate`, `LoadUpdate`, `UseUpdate`.
DONE = "done"
