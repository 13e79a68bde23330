"""The interface of connectors, by vLLM's names (`KVConnectorBase_V1`) where they mean the same. Pure Python."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from specdec.cache.block_moves import BlockSource, PublishedBlock
from specdec.core.request import Request

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.kernels.kernel_set import KernelSet


class KVCaches(NamedTuple):
    """The device's cache, as the worker side of a connector gets it.

    Attributes:
        parts: by name ("target", "features", "head") the cache as `[blocks, …]`. One block id means the same tokens in
            all parts. The head's parts are absent where nothing reads features or no head drafts.
        kernels: the operations that copy blocks.
        num_ranks: number of ranks, each of which has such a cache for its part of every block.
        num_drafting: number of those, the first ones, that have the draft model and its parts.
        common_parts: names of the parts that all of these have alike, bit for bit; none with a single one.
        all_parts: names of the parts of a rank that has the draft model; None for those of `parts`.
    """

    parts: "Mapping[str, Tensor]"
    kernels: "KernelSet"
    num_ranks: int = 1
    num_drafting: int = 1
    common_parts: frozenset[str] = frozenset()
    all_parts: Sequence[str] | None = None


class KVConnector(ABC):
    """Loads blocks of known tokens from elsewhere, and stores blocks that were computed.

    One object serves both sides. Over several ranks each has one, and all of them decide the same: every one takes what
    each of them has done, at the same step, and knows no time but that of `begin_step`. What a connector loads must be
    what the target would compute; whatever it cannot load is computed.

    Scheduler side: `begin_step`, `get_num_new_matched_tokens`, `update_state_after_alloc`, `build_read_meta`,
    `build_connector_meta`, `update_connector_output`, `request_finished`, `is_sending`.

    Worker side: `register_kv_caches`, `start_read_kv`, `start_load_kv`, `wait_for_save`, `get_finished`, `wait`,
    `shutdown`. Whole blocks are copied, before the pass and behind it.

    Attributes:
        supports_ranks: whether it decides the same on all ranks, what `get_finished` returns can be pickled, and
            `update_connector_output` takes it from every rank.
    """

    supports_ranks: ClassVar[bool] = False

    def begin_step(self, clock: float) -> None:  # noqa: B027
        """Take the time of the coming step, in seconds of the first rank's monotonic clock, before all other calls."""

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens behind the first `num_computed_tokens` can be loaded, and False.

        The request is about to be admitted, and its full blocks are hashed (`Request.block_hashes`). None and True: the
        connector is still fetching. The request then waits in the state WAITING_FOR_KV, without a seat or blocks of the
        device, and is asked for again in the next step.

        Args:
            num_computed_tokens: whole blocks that the device's cache has; may be others in the next call.
        """

    @abstractmethod
    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> Sequence[BlockSource]:
        """Return where the request's blocks are loaded from, one source per block; the request is admitted.

        The last block may be used in part. With no external tokens, forget what was found for the request.
        """

    def build_read_meta(self) -> Any:
        """Return what the worker side shall begin to fetch. Called when a step has been planned, be it without rows."""
        return None

    @abstractmethod
    def build_connector_meta(self, published: Sequence[PublishedBlock]) -> Any:
        """Return what the worker side shall store of the blocks that the step has published.

        Called at the end of each step. The blocks keep their content until `wait_for_save` returns. A block is
        published again when the draft head has read it.
        """

    @abstractmethod
    def update_connector_output(self, output: Any, rank: int = 0) -> None:
        """Take what `get_finished` returned on a rank. Called for every rank before each step is planned.

        What a rank has lost is lost: only what all of them have loaded or stored counts.
        """

    def request_finished(self, request: Request) -> None:  # noqa: B027
        """Forget a request that has left the queues, at whatever stage."""

    def is_sending(self, request: Request) -> bool:  # noqa: ARG002
        """Return whether blocks of a finished request are still on their way to where other engines find them."""
        return False

    @abstractmethod
    def register_kv_caches(self, caches: KVCaches) -> None:
        """Take the device's cache, once, before any other call of the worker side."""

    def start_read_kv(self, metadata: Any) -> None:  # noqa: B027
        """Begin, without waiting, what `build_read_meta` has returned."""

    @abstractmethod
    def start_load_kv(self, sources: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy blocks to the device, as sources of `update_state_after_alloc`, in the order of the device's work.

        Called before the step's drafting and its forward pass.
        """

    @abstractmethod
    def wait_for_save(self, metadata: Any) -> None:
        """Copy the blocks of `build_connector_meta` from the device, so that they may be reused afterwards."""

    @abstractmethod
    def get_finished(self) -> Any:
        """Return, without waiting, what the worker side has done since the last call; something false for nothing."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Wait until `get_finished` has news. Called where no request can run before."""

    def shutdown(self) -> None:  # noqa: B027
        """Store what is still to be stored, within a few seconds, and give up threads and connections."""
