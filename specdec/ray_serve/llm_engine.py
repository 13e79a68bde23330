"""An engine for Ray Serve LLM, by Ray's `LLMEngine` protocol. Needs Ray.

A configuration file names its server as `server_cls: specdec.ray_serve.llm_server:SpecdecServer`; see
`docker/ray_llm.yaml`. The protocol's types of requests and answers are those that Ray takes from vLLM or SGLang, so one
of these packages must be installed. Nothing else of them is used.
"""

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from importlib import import_module
from typing import Any, cast

from ray.llm._internal.serve.core.configs.llm_config import LLMConfig
from ray.llm._internal.serve.core.engine.protocol import LLMEngine
from starlette.types import ASGIApp

from specdec.async_engine.async_llm import AsyncLLM
from specdec.async_engine.errors import EngineDeadError
from specdec.config import AUTO
from specdec.ray_serve.application_call import call
from specdec.server.app import build_app
from specdec.server.server_settings import ServerSettings
from specdec.server.service import Service

# Ray's classes of what the protocol speaks.
_TYPES = "ray.llm._internal.serve.core.configs.openai_api_models"
# The model id that stands for the demo model where no source is given.
_DEMO = "demo"
# What engine_kwargs holds beside the keywords of `LLM`.
_OWN = ("draft", "server")
# Settings of a server without effect here, with what to do instead.
_KEYS = "Ray Serve's ingress takes the requests, so check keys in front of it"
_ELSEWHERE = {
    "api_key": _KEYS,
    "admin_api_key": _KEYS,
    "lora_modules": "Ray Serve LLM names no adapters of this engine; serve a merged checkpoint",
}
_NOT_FOUND = 404


class SpecdecEngine(LLMEngine):  # type: ignore[misc]
    """An engine process behind the protocol's methods, which post to the routes of `specdec serve`.

    Args:
        llm_config: `model_loading_config` has the model's id and, as `model_source`, what `LLM` takes as model;
            `engine_kwargs` are keywords of `LLM`, `draft`, and `server`, an object of `ServerSettings`. API keys and
            options of the connection are Ray Serve's matter.

    Raises:
        ValueError: an unknown setting, one outside its range, or keys or adapters of the server.
    """

    def __init__(self, llm_config: LLMConfig) -> None:
        loading, settings = cast(Any, llm_config.model_loading_config), dict(llm_config.engine_kwargs)
        own = {name: settings.pop(name) for name in _OWN if name in settings}
        server = {"served_model_name": [llm_config.model_id], **own.get("server", {})}
        for name, remedy in _ELSEWHERE.items():
            if server.get(name):
                raise ValueError(f"server has {name}; {remedy}")
        checked = ServerSettings(**server)
        source = loading.model_source or (None if loading.model_id == _DEMO else loading.model_id)
        self._llm = AsyncLLM(source, own.get("draft", AUTO), engine_timeout=checked.engine_timeout, **settings)
        self._app = build_app(Service(self._llm, checked, llm_config.model_id))

    async def start(self) -> None:
        """Start the engine process and wait until the model is loaded."""
        await self._llm.start()

    async def shutdown(self) -> None:
        """End the engine process."""
        await self._llm.close()

    async def check_health(self) -> None:
        """Return if the engine process takes requests. Ray replaces a replica whose engine does not for several checks.

        Raises:
            EngineDeadError: it does not.
        """
        if not self._llm.healthy:
            raise EngineDeadError("the engine process is not there", restarting=True)

    def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any]:  # noqa: ARG002
        """Answer a chat; yield events as text where the request asks for a stream, else Ray's type of answer."""
        return self._post("/v1/chat/completions", request, "ChatCompletionResponse")

    def completions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any]:  # noqa: ARG002
        """Complete a prompt; see `chat`."""
        return self._post("/v1/completions", request, "CompletionResponse")

    def tokenize(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any]:  # noqa: ARG002
        """Tokenize a text or messages."""
        return self._post("/tokenize", request, "TokenizeResponse")

    def detokenize(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any]:  # noqa: ARG002
        """Turn tokens into text."""
        return self._post("/detokenize", request, "DetokenizeResponse")

    async def embeddings(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any]:  # noqa: ARG002
        """Refuse: there are no embeddings."""
        yield _refusal(_NOT_FOUND, {"message": "embeddings are not supported: the engine generates text"})

    async def transcriptions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any]:  # noqa: ARG002
        """Refuse: there are no transcriptions."""
        yield _refusal(_NOT_FOUND, {"message": "transcriptions are not supported: the engine generates text"})

    async def build_asgi_app(self) -> ASGIApp:
        """Return the application of `specdec serve`, for Ray's direct streaming."""
        return self._app

    def routing_stats(self) -> dict[str, Any]:
        """Return nothing: Ray's router learns of no blocks."""
        return {}

    async def resolve_lora(self, lora_model: Any) -> None:
        """Refuse.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"LoRA model {lora_model!r}: adapters are not supported; serve a merged checkpoint")

    async def reset_prefix_cache(self) -> None:
        """Refuse.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("the prefix cache of a running engine cannot be emptied; start it anew")

    async def _post(self, path: str, request: Any, kind: str) -> AsyncGenerator[Any]:
        """Yield the answer of a route: events as text, or one object of Ray's type `kind` or `ErrorResponse`."""
        body = request.model_dump(mode="json", exclude_unset=True)
        # Ray Serve's name of the request, which is no field of the routes.
        name = body.pop("request_id", None)
        parts: list[bytes] = []
        status = 200
        async with aclosing(call(self._app, path, body, name)) as replies:
            async for status, data in replies:
                if body.get("stream") and status == 200:
                    yield data.decode()
                else:
                    parts.append(data)
        if parts:
            answer = json.loads(b"".join(parts))
            yield _types(kind).model_validate(answer) if status == 200 else _refusal(status, answer["error"])


def _types(name: str) -> Any:
    """Return one of Ray's types; imported late, since Ray refuses to import them without vLLM or SGLang."""
    return getattr(import_module(_TYPES), name)


def _refusal(status: int, error: Mapping[str, Any]) -> Any:
    """Return an error of the routes as Ray's type, with the HTTP status that its ingress answers with."""
    fields = {"type": "invalid_request_error", "param": None, **error, "code": status}
    info = _types("ErrorInfo")(**{name: fields[name] for name in ("message", "type", "param", "code")})
    return _types("ErrorResponse")(error=info)
