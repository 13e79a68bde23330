"""Messages of the first rank to the others, and their answers."""

from pathlib import Path
from typing import Any, NamedTuple

from specdec.config import EngineConfig
from specdec.execution.step_codec import SentOrder
from specdec.execution.step_order import DraftOrder, EntryMoves, PassOrder
from specdec.models.lora_adapter import AdapterFiles


class Join(NamedTuple):
    """First message: load the target.

    Attributes:
        timeout: seconds of an operation between ranks.
    """

    config: EngineConfig
    rank: int
    timeout: float


class LoadDrafts(NamedTuple):
    """Load the draft model; to the ranks of the last stage."""


class Tap(NamedTuple):
    """Send the inputs of target layers along; to the ranks of earlier stages.

    Attributes:
        layers: layers that the draft model reads.
    """

    layers: tuple[int, ...]


class Fit(NamedTuple):
    """Find how many cache blocks the memory holds. On a GPU, the largest steps follow, and `Rehearsed`."""


class Rehearsed(NamedTuple):
    """The largest steps have run."""


class Allocate(NamedTuple):
    """Make a worker whose cache has this many blocks, in place of an earlier worker."""

    num_blocks: int
    num_host_blocks: int


class LoadUpdate(NamedTuple):
    """Load another head beside the present one; see `WorkerMaker.load_draft`."""

    folder: Path


class UseUpdate(NamedTuple):
    """Draft with the head that was loaded last, from the next step on."""


class LoadAdapter(NamedTuple):
    """Read an adapter; see `WorkerMaker.read_adapter`."""

    files: AdapterFiles


class UseAdapter(NamedTuple):
    """Put the adapter that was read last into a place of the banks."""

    place: int


class Connect(NamedTuple):
    """Make the connector of the settings on the worker's cache; see `WorkerMaker.connect`."""

    block_bytes: int


class ReadKV(NamedTuple):
    """Call `KVConnector.start_read_kv`."""

    metadata: Any


class BeginSaveKV(NamedTuple):
    """Call `KVConnector.start_save_kv`, for the next step."""

    metadata: Any


class SaveKV(NamedTuple):
    """Call `KVConnector.wait_for_save`, for the step before."""

    metadata: Any


class Disconnect(NamedTuple):
    """Store what a connector has still to store, and give it up."""


class Refusal(NamedTuple):
    """Answer to `LoadUpdate`, `LoadAdapter` and `Connect` that cannot be carried out: the rank is as before."""

    reason: str


class Alive(NamedTuple):
    """Sign of life of a follower, once it has loaded the target: one every `BEAT` seconds, whatever it does."""


class Transferred(NamedTuple):
    """Report of a follower's connector, sent unasked: what `KVConnector.get_finished` has returned there."""

    output: Any


class Failure(NamedTuple):
    """Last message of a follower that fails."""

    reason: str


Message = (
    Join
    | LoadDrafts
    | Tap
    | Fit
    | Rehearsed
    | Allocate
    | LoadUpdate
    | UseUpdate
    | LoadAdapter
    | UseAdapter
    | Connect
    | ReadKV
    | BeginSaveKV
    | SaveKV
    | Disconnect
    | EntryMoves
    | PassOrder
    | DraftOrder
    | SentOrder
)
BEAT = 1.0
# Answers. To `Join`: 0, twice, when the rank is there and when it has loaded. To `LoadDrafts` and `Tap`: bytes of a
# block. To `Fit`: number of blocks. To `Allocate`, to those that load and use, and that connect and disconnect: 0.
Answer = int | Refusal | Alive | Transferred | Failure
