"""An application of Ray Serve for a cluster: the HTTP front ends and the replicas. Needs Ray.

A configuration file names it as `import_path: specdec.ray_serve.application:build`; see `docker/replicas.yaml`, and
`docker/prefill_decode.yaml` for a split of prefill and decoding.
"""

from collections.abc import Mapping
from typing import Any, cast

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from specdec.building.vllm_keywords import LLMKeywords
from specdec.config import AUTO
from specdec.kernels.types.settings import unknown_name
from specdec.ray_serve.deployment import PREFILL, HandleReplicas, engine_deployment
from specdec.ray_serve.remote_prefill import RemotePrefill
from specdec.ray_serve.replicated_llm import ReplicatedLLM
from specdec.server.app import build_app
from specdec.server.server_settings import ServerSettings
from specdec.server.service import Service

# Name of the deployment of the front ends, by which a configuration file sets its options.
FRONT = "front"
# Most requests that a front end passes on at a time. Replicas have lower limits of their own.
MAX_ONGOING = 100_000
ARGUMENTS = ("model", "draft", "settings", "server", "prefill_settings")
# Settings of the replicas' device, which a front end may not have.
OF_THE_DEVICE = ("device", "dtype", "kernels", "quantization", "threads")


@serve.deployment(name=FRONT, max_ongoing_requests=MAX_ONGOING)
@serve.ingress()
class Front:
    """The HTTP application of one server, behind Ray Serve's proxy. It reads the configuration and the tokenizer.

    Args:
        replicas: the deployment of the replicas.
        prefill: the deployment of those that compute prompts for them; None without.
        model, draft, settings: as `LLM` takes them.
        server: fields of `ServerSettings`; those of the connection are the proxy's matter.
    """

    def __init__(
        self,
        replicas: DeploymentHandle,
        prefill: DeploymentHandle | None,
        model: str | None,
        draft: str | None,
        settings: Mapping[str, Any],
        server: Mapping[str, Any],
    ) -> None:
        own = {name: value for name, value in settings.items() if name not in OF_THE_DEVICE}
        remote = None if prefill is None else RemotePrefill(HandleReplicas(prefill))
        keywords = cast(LLMKeywords, {**own, "device": "cpu"})
        self._llm = ReplicatedLLM(HandleReplicas(replicas), model, draft, prefill=remote, **keywords)
        self._service = Service(self._llm, ServerSettings(**server), model or "demo")

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application; Ray Serve asks for it once."""
        await self._llm.start()
        # Replicas may start later than this; they load adapters with the first requests.
        self._service.adapters.serve_given()
        return build_app(self._service)


def build(arguments: dict[str, Any]) -> serve.Application:
    """Return the application that `args` of a configuration file describe; Ray Serve calls this.

    Args:
        arguments: model, draft and settings, as `LLM` takes them; server, an object of `ServerSettings`;
            prefill_settings, what differs from settings in replicas that compute prompts for the others. All may be
            left out; without prefill_settings there are no such replicas. Paths must exist on all machines of the
            cluster.

    Raises:
        ValueError: an unknown argument or server setting, or one outside its range.
    """
    for name in arguments:
        if name not in ARGUMENTS:
            raise unknown_name("args", name, ARGUMENTS)
    model, draft = arguments.get("model"), arguments.get("draft", AUTO)
    settings, server = dict(arguments.get("settings", {})), dict(arguments.get("server", {}))
    if server.get("allow_runtime_lora_updating"):
        raise ValueError(
            "allow_runtime_lora_updating is given; one front end would know of an adapter that others do not; name "
            "all in lora_modules, and deploy the application anew to change them"
        )
    timeout = ServerSettings(**server).engine_timeout
    front, prefill = cast(Any, Front), None
    if "prefill_settings" in arguments:
        own = {**settings, "role": "prefill", **(arguments["prefill_settings"] or {})}
        prefill = engine_deployment(model, draft, own, timeout, PREFILL)
        settings = {"role": "decode", **settings}
    return front.bind(engine_deployment(model, draft, settings, timeout), prefill, model, draft, settings, server)
