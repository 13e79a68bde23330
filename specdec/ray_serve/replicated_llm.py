"""The asynchronous Python API in front of replicas."""

from dataclasses import replace
from pathlib import Path
from typing import Unpack

from specdec.async_engine.async_llm import AsyncLLM, engine_setup
from specdec.async_engine.connection import EngineConnection
from specdec.async_engine.messages import Setup
from specdec.building.vllm_keywords import LLMKeywords
from specdec.config import AUTO, EngineConfig
from specdec.kv_transfer.kv_transfer_config import ROLES_OF_A_SPLIT, tiers_of
from specdec.ray_serve.connection import ReplicaConnection
from specdec.ray_serve.remote_prefill import RemotePrefill
from specdec.ray_serve.replicas import Replicas


class ReplicatedLLM(AsyncLLM):
    """An `AsyncLLM` whose requests run on replicas. This process reads the configuration and the tokenizer alone.

    Args:
        replicas: calls of the replicas, which have the same model and settings.
        model, draft, settings: as `LLM` takes them.
        prefill: computes prompts ahead of the replicas; None where each computes its own.

    Raises:
        CheckpointError: a folder whose configuration or tokenizer cannot be read.
        ValueError: an unknown setting, or one outside its range.
    """

    def __init__(
        self,
        replicas: Replicas,
        model: str | Path | None = None,
        draft: str | Path | None = AUTO,
        *,
        prefill: RemotePrefill | None = None,
        **settings: Unpack[LLMKeywords],
    ) -> None:
        self._replicas, self._prefill = replicas, prefill
        super().__init__(model, draft, **settings)
        if self.config.collect_drafts is not None:
            raise ValueError(
                f"collect_drafts is {self.config.collect_drafts}; one engine writes there; use no replicas"
            )

    async def update_draft(self, draft: str | Path) -> None:
        """Refuse: replicas that start later would have another head than the others.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"draft is {str(draft)!r}; replicas cannot replace their head; deploy the application anew")

    def _connect(self, setup: Setup, timeout: float) -> EngineConnection:  # noqa: ARG002
        return ReplicaConnection(self._replicas, self._exchange, self.config.block_size, self._prefill)


def replicated_here(
    num_replicas: int,
    model: str | Path | None = None,
    draft: str | Path | None = AUTO,
    *,
    num_prefill: int = 0,
    engine_timeout: float = 300.0,
    **settings: Unpack[LLMKeywords],
) -> ReplicatedLLM:
    """Return the front end of replicas that it deploys itself. Needs Ray.

    Args:
        num_prefill: replicas that compute prompts for the others, with which they share a store; 0 for none.
        model, draft, engine_timeout, settings: as `AsyncLLM` takes them.

    Raises:
        ValueError: settings that are refused, or without a store that replicas share.
    """
    from specdec.ray_serve.deployment import OwnReplicas

    config, setup = engine_setup(model, draft, settings)
    if num_prefill:
        _check_split(config)
    # Replicas run in other folders.
    draft_folder = None if config.draft is None else config.draft.absolute()
    config = replace(config, model=config.model.absolute(), draft=draft_folder)
    uses_gpu = config.device.startswith("cuda")
    arguments = (str(config.model), config.sources, setup.settings, engine_timeout)
    own = OwnReplicas(num_replicas, uses_gpu, *arguments, num_prefill)
    prefill = RemotePrefill(own.prefill) if num_prefill else None
    return ReplicatedLLM(own, config.model, config.sources, prefill=prefill, **setup.settings)


def _check_split(config: EngineConfig) -> None:
    """Refuse settings with which replicas of the two roles could not work together."""
    if config.role != "both":
        raise ValueError(f"role is {config.role!r} and there are prefill replicas, which have their own; leave it out")
    for role in ROLES_OF_A_SPLIT:
        replace(config, role=role)
    assert config.kv_transfer_config is not None
    if config.kv_transfer_config.kv_connector_module_path is None:
        for folder, _ in tiers_of(config.kv_transfer_config).disks:
            if not folder.is_absolute():
                raise ValueError(f"root_dir {folder} is relative, and replicas run in other folders; give all of it")
