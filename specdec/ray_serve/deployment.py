"""Replicas as a deployment of Ray Serve. Needs Ray."""

import asyncio
import logging
import os
import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from specdec.async_engine.errors import EngineDeadError
from specdec.kernels.types.threads import usable_processors
from specdec.ray_serve.engine_replica import EngineReplica
from specdec.ray_serve.replicas import Route
from specdec.ray_serve.request_router import PrefixRequestRouter

# Names of the deployments, by which a configuration file sets their options: engines that generate, and those that
# compute prompts for them, if there are any.
ENGINE, PREFILL = "engine", "prefill"
# Ray's word for a new cluster on this machine.
LOCAL = "local"
# Requests that a replica takes; the engine queues what does not fit its batch. Ray Serve's own default is 5.
MAX_ONGOING = 1024
# A replica that cannot start will not start the second time either.
MOST_STARTS = 1


class RayReplica(EngineReplica):
    """A replica that Ray Serve ends."""

    async def __del__(self) -> None:
        """End the engine process; Ray Serve waits for this after the last request."""
        await self.close()


def engine_deployment(
    model: str | Path | None,
    draft: str | Path | None,
    settings: Mapping[str, Any],
    engine_timeout: float,
    name: str = ENGINE,
    **options: Any,
) -> serve.Application:
    """Return the deployment of the replicas, bound to its arguments.

    Args:
        model, draft, settings: as `LLM` takes them.
        engine_timeout: as `AsyncLLM` takes it.
        name: `ENGINE` or `PREFILL`.
        options: options of Ray Serve's deployments, such as `num_replicas`.
    """
    deployment = serve.deployment(
        RayReplica,
        name=name,
        max_ongoing_requests=MAX_ONGOING,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRequestRouter),
        **options,
    )
    return deployment.bind(model, draft, dict(settings), engine_timeout)


class HandleReplicas:
    """Calls of the replicas through a handle.

    Args:
        handle: None for replicas that are deployed later.
    """

    def __init__(self, handle: DeploymentHandle | None = None) -> None:
        self.handle = handle

    async def start(self) -> None:
        """Do nothing: calls wait for the first replica."""

    async def generate(self, name: str, command: bytes, route: Route) -> AsyncIterator[bytes]:
        """Call one replica. Closing the iterator cancels the call."""
        parts = self._started.options(method_name="generate", stream=True).remote(name, command, route)
        try:
            async for part in parts:
                yield part
        except BaseException:
            parts.cancel()
            raise

    async def abort(self, name: str, route: Route) -> None:
        """Call one replica."""
        await self._started.options(method_name="abort").remote(name, route)

    async def ask(self, command: bytes) -> Sequence[bytes]:
        """Call all replicas."""
        answers: list[bytes] = await self._started.broadcast("ask", command).results_async()
        return answers

    async def close(self) -> None:
        """Do nothing: the replicas belong to the application that this front end is a part of."""

    @property
    def _started(self) -> DeploymentHandle:
        assert self.handle is not None, "not started"
        return self.handle


class OwnReplicas(HandleReplicas):
    """Replicas that this process deploys, on the cluster that RAY_ADDRESS names, or else on this machine.

    Args:
        num_replicas: how many.
        uses_gpu: whether each gets a GPU of its own; otherwise they share the machine's cores.
        model, draft, settings, engine_timeout: as `EngineReplica` takes them.
        num_prefill: how many more compute prompts for the others; 0 for none, where each computes its own.

    Attributes:
        prefill: calls of those that compute prompts.
    """

    def __init__(
        self,
        num_replicas: int,
        uses_gpu: bool,
        model: str | Path | None,
        draft: str | Path | None,
        settings: Mapping[str, Any],
        engine_timeout: float,
        num_prefill: int = 0,
    ) -> None:
        super().__init__()
        self.prefill = HandleReplicas()
        # Not the machine's latest cluster, which may be someone else's.
        self._address = os.environ.get("RAY_ADDRESS", LOCAL)
        self._num_replicas, self._uses_gpu = num_replicas + num_prefill, uses_gpu
        cores = max(1, usable_processors() // self._num_replicas)
        resources = {"num_gpus": 1} if uses_gpu else {"num_cpus": cores} if self._address == LOCAL else {}

        def application(name: str, count: int, own: Mapping[str, Any]) -> serve.Application:
            return engine_deployment(
                model,
                draft,
                {**settings, **own},
                engine_timeout,
                name,
                num_replicas=count,
                max_constructor_retry_count=MOST_STARTS,
                # Ray sets OMP_NUM_THREADS to the cores of a replica.
                ray_actor_options=resources,
            )

        if num_prefill:
            self._applications = {
                ENGINE: application(ENGINE, num_replicas, {"role": "decode"}),
                PREFILL: application(PREFILL, num_prefill, {"role": "prefill"}),
            }
        else:
            self._applications = {ENGINE: application(ENGINE, num_replicas, {})}
        self._num_cores = cores * self._num_replicas
        # Several servers may run on one cluster.
        self._name = f"specdec-{secrets.token_hex(4)}"

    async def start(self) -> None:
        """Start or join the cluster, and wait until all replicas take calls.

        Raises:
            ValueError: this machine has too few GPUs.
            EngineDeadError: they do not start.
        """
        handles = await asyncio.to_thread(self._deploy)
        self.handle, self.prefill.handle = handles[ENGINE], handles.get(PREFILL)

    def _deploy(self) -> dict[str, DeploymentHandle]:
        is_mine = self._address == LOCAL
        options: dict[str, Any] = {"num_cpus": self._num_cores, "include_dashboard": False} if is_mine else {}
        # What they tell about their start is no news of the server.
        ray.init(self._address, log_to_driver=False, logging_level=logging.ERROR, **options)
        gpus = int(ray.cluster_resources().get("GPU", 0))
        if is_mine and self._uses_gpu and gpus < self._num_replicas:
            raise ValueError(f"{self._num_replicas} replicas need as many GPUs; this machine has {gpus}; give fewer")
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        try:
            return {
                name: serve.run(application, name=f"{self._name}-{name}", route_prefix=None)
                for name, application in self._applications.items()
            }
        except RuntimeError as error:
            raise EngineDeadError(f"the replicas do not start: {_cause(error)}") from None

    async def close(self) -> None:
        """End the replicas, and the cluster if `start` started it."""
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        if not ray.is_initialized():
            return
        if self._address == LOCAL:
            serve.shutdown()
        else:
            for name in self._applications:
                serve.delete(f"{self._name}-{name}")
        ray.shutdown()


def _cause(error: RuntimeError) -> str:
    """Return the line that names the error in a replica's traceback, or else the last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b.*: ", line)]
    return (named or lines or [type(error).__name__])[-1]
