"""LoRA adapters of an engine: loading, unloading, and eviction of the least recently used."""

import logging
import time
from pathlib import Path

from specdec.config import EngineConfig
from specdec.core.device import on_device
from specdec.core.errors import QueueFullError
from specdec.core.lora_request import LoadedAdapter, LoRARequest
from specdec.execution.executor import Executor
from specdec.kernels.kernel_set import KernelSet
from specdec.kv_transfer.cache_identity import content_identity, identity
from specdec.models.lora_adapter import CONFIG, WEIGHTS, AdapterFiles

logger = logging.getLogger(__name__)


class EngineAdapters:
    """Loads adapters into the places of a bank when a request first asks for them.

    When all places are taken, the least recently used adapter that no unfinished request has is evicted.

    Its methods are called between two steps.

    Args:
        executor: has the banks of target and draft model.
    """

    def __init__(self, config: EngineConfig, executor: Executor, kernels: KernelSet) -> None:
        self._config, self._executor, self._kernels = config, executor, kernels
        self._ranks = executor.ranks
        # The least recently used first; then those that were unloaded while requests had them.
        self._loaded: dict[LoRARequest, LoadedAdapter] = {}
        self._leaving: list[LoadedAdapter] = []

    def load(self, request: LoRARequest) -> LoadedAdapter:
        """Return an adapter, which is loaded if it is not yet.

        Raises:
            CheckpointError: no adapter that fits the target.
            ValueError: an engine without adapters, or another adapter of the same id is loaded.
            QueueFullError: requests that have not ended have as many other adapters as there are places.
        """
        if not isinstance(request, LoRARequest):
            raise ValueError(f"lora_request is {request!r:.60}; it must be a LoRARequest")
        if not self._config.enable_lora:
            raise ValueError(f"lora_request names {request.lora_name!r}; start the engine with enable_lora")
        adapter = self._loaded.pop(request, None) or self._load(request)
        self._loaded[request] = adapter
        return adapter

    def unload(self, lora_int_id: int) -> bool:
        """Give up an adapter's place once no request has it; return whether it was loaded."""
        found = [request for request in self._loaded if request.lora_int_id == lora_int_id]
        for request in found:
            adapter = self._loaded.pop(request)
            if adapter.is_used:
                self._leaving.append(adapter)
        return bool(found)

    def loaded(self) -> list[LoRARequest]:
        """Return the adapters that are loaded, the least recently used first."""
        return list(self._loaded)

    def _load(self, request: LoRARequest) -> LoadedAdapter:
        for other in self._loaded:
            if other.lora_int_id == request.lora_int_id:
                raise ValueError(
                    f"lora_int_id {request.lora_int_id} is that of {other.lora_name!r} from {other.lora_path}; give "
                    "each adapter its own, or unload that one"
                )
        began = time.perf_counter()
        # Which requests are in use is not known to all ranks at the same moment.
        place, evicted = self._ranks.decide(self._free_place)
        paths = request.lora_path, request.draft_lora_path
        files = AdapterFiles(*(Path(path) if path else None for path in paths))
        with on_device(self._executor.worker.device), self._kernels.limited_threads():
            self._executor.load_adapter(place, files)
        if evicted is not None:
            del self._loaded[evicted]
        facts: dict[str, object] = {"name": request.lora_name, "files": _content(files.target)}
        if files.draft is not None:
            # Entries of the draft model's cache depend on it.
            facts["draft_files"] = _content(files.draft)
        found = [str(folder) for folder in files if folder is not None]
        logger.info(
            "adapter %s: %s, loaded in %.1f s", request.lora_name, ", ".join(found), time.perf_counter() - began
        )
        return LoadedAdapter(request, place, identity(facts))

    def check_draft(self) -> None:
        """Refuse to have the draft model replaced while an adapter of it is loaded; for the first rank to decide.

        Raises:
            ValueError: one is.
        """
        self._leaving = [adapter for adapter in self._leaving if adapter.is_used]
        for adapter in [*self._loaded.values(), *self._leaving]:
            if adapter.draft_place:
                name = adapter.request.lora_name
                raise ValueError(f"the adapter {name!r} is made for the present draft model too; unload it first")

    def _free_place(self) -> tuple[int, LoRARequest | None]:
        """Return a place that no unfinished request uses, and the request of the adapter in it, None if it is empty."""
        self._leaving = [adapter for adapter in self._leaving if adapter.is_used]
        taken = {adapter.place for adapter in [*self._loaded.values(), *self._leaving]}
        if free := [place for place in range(1, self._config.max_loras + 1) if place not in taken]:
            return free[0], None
        for request, adapter in self._loaded.items():
            if not adapter.is_used:
                return adapter.place, request
        raise QueueFullError(
            f"running requests have max_loras {self._config.max_loras} other adapters; try again later, or raise "
            "max_loras"
        )


def _content(folder: Path | None) -> list[str]:
    return [] if folder is None else [content_identity(folder / name) for name in (CONFIG, WEIGHTS)]
