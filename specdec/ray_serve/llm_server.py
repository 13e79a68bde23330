"""The deployment of Ray Serve LLM that runs `SpecdecEngine`. Needs Ray, and vLLM or SGLang for types of requests."""

import copy
from typing import Any

from ray.serve.llm import LLMServer

from specdec.ray_serve.llm_engine import SpecdecEngine


class SpecdecServer(LLMServer):  # type: ignore[misc]
    """An `LLMServer` whose engine is specdec's.

    Ray plans resources for vLLM's worker processes; the engine here runs beside its replica, so the replica itself asks
    for them, by `ray_actor_options` of `deployment_config`.
    """

    _default_engine_cls = SpecdecEngine

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:
        """Return the options of the deployment: those of `deployment_config`, and the configuration's environment."""
        options: dict[str, Any] = copy.deepcopy(llm_config.deployment_config)
        if llm_config.runtime_env:
            actor = options.setdefault("ray_actor_options", {})
            actor["runtime_env"] = {**actor.get("runtime_env", {}), **llm_config.runtime_env}
        return options
