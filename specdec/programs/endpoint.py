"""An OpenAI-compatible endpoint as the backend of programs, without packages beyond Python's own."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from http.client import HTTPException
from typing import Any, Self
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from specdec.core.choices import ChoiceScore
from specdec.core.sampling_params import SamplingParams
from specdec.programs.backend import Generated, LoopThread
from specdec.programs.expressions import DEFAULT_MAX_TOKENS, Gen
from specdec.programs.transcript import Transcript

# Characters of an answer that an error shows.
_MOST_SHOWN = 300


class EndpointError(RuntimeError):
    """An endpoint refused a call or could not be reached. The message is one line.

    Attributes:
        status: status of the answer, None without one.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Endpoint:
    """An HTTP server with OpenAI's API, such as `specdec serve`, which runs programs.

    with Endpoint("http://127.0.0.1:8000/v1") as endpoint:
        state = program.run("a question", backend=endpoint)

    Text goes to `/completions`, conversations to `/chat/completions`. A conversation whose assistant has begun its
    message needs a server that knows `continue_final_message`, and `select` one that knows `/score_choices`.

    Args:
        url: the API's address, with `/v1`.
        model: name of the model; None for a server that needs none.
        api_key: key of the server; None for none.
        timeout: seconds without a byte after which a call fails.
        max_connections: most calls at once, each in a thread.

    Attributes:
        num_calls: calls so far.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
        max_connections: int = 64,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url is {url!r}; it must begin with http:// or https://")
        self._url, self._model, self._timeout, self.num_calls = url.rstrip("/"), model, timeout, 0
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._threads = ThreadPoolExecutor(max_connections, "specdec-endpoint")
        self.loop = LoopThread("specdec-endpoint")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all programs that still run; calls that run end by themselves."""
        self.loop.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def generate(
        self, transcript: Transcript, asked: Gen, defaults: Mapping[str, Any], on_text: Callable[[str], None]
    ) -> Generated:
        """See `Backend.generate`. The text comes in one part."""
        given = {"max_tokens": DEFAULT_MAX_TOKENS, **defaults, **asked.given}
        # Refuses what the run's parameters and those of the `gen` do not allow together.
        SamplingParams(**given)
        is_chat = transcript.is_conversation
        path = "/chat/completions" if is_chat else "/completions"
        reply = await self._post(path, {**_fields(given), **_prompt(transcript)})
        with self._reading(path, reply):
            choice, usage = reply["choices"][0], reply.get("usage") or {}
            text = (choice["message"]["content"] if is_chat else choice["text"]) or ""
            if not isinstance(text, str):
                raise TypeError("the text is none")
            reason = choice.get("finish_reason")
            details = usage.get("prompt_tokens_details") or {}
            counts = usage.get("completion_tokens", 0), usage.get("prompt_tokens"), details.get("cached_tokens")
            found = Generated(text, reason, *counts)
        if reason in ("error", "abort"):
            raise EndpointError(f"{self._url}{path}: the request ended with finish_reason {reason!r}")
        on_text(text)
        return found

    async def score(self, transcript: Transcript, choices: Sequence[str]) -> list[ChoiceScore]:
        """See `Backend.score`."""
        try:
            reply = await self._post("/score_choices", {**_prompt(transcript), "choices": list(choices)})
        except EndpointError as error:
            if error.status in (404, 405):
                message = f"{error}; select needs a server with /score_choices, such as `specdec serve`"
                raise EndpointError(message, error.status) from None
            raise
        with self._reading("/score_choices", reply):
            return [ChoiceScore(one["token_ids"], one["token_logprobs"]) for one in reply["choices"]]

    @contextmanager
    def _reading(self, path: str, reply: Any) -> Iterator[None]:
        """Raise an EndpointError where an answer does not have the fields that the API gives it."""
        try:
            yield
        except (LookupError, TypeError, AttributeError):
            message = f"{self._url}{path}: the answer lacks fields of OpenAI's API: {reply!r:.300}"
            raise EndpointError(message) from None

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the answer to a call.

        Raises:
            EndpointError: the endpoint refused the call, cannot be reached, or answered with something else than JSON.
        """
        self.num_calls += 1
        named = {**body, **({} if self._model is None else {"model": self._model})}
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._answer, path, named)

    def _answer(self, path: str, body: Mapping[str, Any]) -> Any:
        address = f"{self._url}{path}"
        try:
            request = Request(address, json.dumps(body).encode(), self._headers)
            with urlopen(request, timeout=self._timeout) as reply:
                return json.load(reply)
        except HTTPError as error:
            raise EndpointError(f"{address}: status {error.code}: {_reason(error)}", error.code) from None
        except (OSError, HTTPException) as error:
            raise EndpointError(f"{address}: {getattr(error, 'reason', error)}") from None
        except ValueError as error:
            raise EndpointError(f"{address}: the answer is not JSON: {error}") from None


def _reason(error: HTTPError) -> str:
    """Return an error's message in OpenAI's shape, or the beginning of its text, or else the status in words."""
    text = error.reason
    try:
        text = error.read().decode(errors="replace")
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError, OSError, HTTPException):
        return " ".join(text[:_MOST_SHOWN].split())


def _prompt(transcript: Transcript) -> dict[str, Any]:
    """Return a transcript as fields of a request."""
    if not transcript.is_conversation:
        return {"prompt": transcript.text}
    goes_on = {"continue_final_message": True, "add_generation_prompt": False} if transcript.text else {}
    return {"messages": transcript.conversation(), **goes_on}


def _fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling parameters as fields of a request, which have their names."""
    return {name: _given(value) if is_dataclass(value) else value for name, value in given.items()}


def _given(value: Any) -> dict[str, Any]:
    return {field: one for field, one in asdict(value).items() if one is not None}
