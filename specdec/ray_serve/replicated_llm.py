"""The asynchronous Python API in front of replicas."""

from dataclasses import replace
from pathlib import Path
from typing import Unpack

from specdec.async_engine.async_llm import AsyncLLM, engine_setup
from specdec.async_engine.connection import EngineConnection
from specdec.async_engine.messages import Setup
from specdec.config import AUTO
from specdec.engine.vllm_keywords import LLMKeywords
from specdec.ray_serve.connection import ReplicaConnection, Replicas


class ReplicatedLLM(AsyncLLM):
    """An `AsyncLLM` whose requests run on replicas. This process reads the configuration and the tokenizer alone.

    Args:
        replicas: calls of the replicas, which have the same model and settings.
        model, draft, settings: as `LLM` takes them.

    Raises:
        CheckpointError: a folder whose configuration or tokenizer cannot be read.
        ValueError: an unknown setting, or one outside its range.
    """

    def __init__(
        self,
        replicas: Replicas,
        model: str | Path | None = None,
        draft: str | Path | None = AUTO,
        **settings: Unpack[LLMKeywords],
    ) -> None:
        self._replicas = replicas
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
        return ReplicaConnection(self._replicas, self._receive, self._fail, self.config.block_size)


def replicated_here(
    num_replicas: int,
    model: str | Path | None = None,
    draft: str | Path | None = AUTO,
    *,
    engine_timeout: float = 300.0,
    **settings: Unpack[LLMKeywords],
) -> ReplicatedLLM:
    """Return the front end of replicas that it deploys itself. Needs Ray.

    Args:
        model, draft, engine_timeout, settings: as `AsyncLLM` takes them.
    """
    from specdec.ray_serve.deployment import OwnReplicas

    config, setup = engine_setup(model, draft, settings)
    # Replicas run in other folders.
    draft_folder = None if config.draft is None else config.draft.absolute()
    config = replace(config, model=config.model.absolute(), draft=draft_folder)
    uses_gpu = config.device.startswith("cuda")
    own = OwnReplicas(num_replicas, uses_gpu, str(config.model), config.sources, setup.settings, engine_timeout)
    return ReplicatedLLM(own, config.model, config.sources, **setup.settings)
