"""An OpenAI-compatible endpoint as the backend of programs."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, Self

from specdec.core.choices import ChoiceScore
from specdec.core.sampling_params import SamplingParams
from specdec.core.speculation import Speculation
from specdec.core.structured_outputs import StructuredOutputsParams
from specdec.programs.backend import Generated, LoopThread
from specdec.programs.expressions import DEFAULT_MAX_TOKENS, Gen
from specdec.programs.json_client import EndpointError, JsonClient
from specdec.programs.run_ahead import Served, WrittenAhead, can_run_ahead
from specdec.programs.transcript import Transcript

logger = logging.getLogger(__name__)
# Parameters that are objects with fields of their own.
_NESTED = (StructuredOutputsParams, Speculation)


class _Reply(NamedTuple):
    """An answer.

    Attributes:
        tokens: texts of its tokens; None unless asked for.
    """

    text: str
    finish_reason: str | None
    tokens: list[str] | None
    num_tokens: int
    num_prompt_tokens: int | None


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
        run_ahead: tokens that a `gen` at temperature 0 asks for beyond its limit and its stop, from which the next ones
            are served; 0 for none.
        timeout: seconds without a byte after which a call fails.
        max_connections: most calls at once.

    Attributes:
        num_served: number of `gen`s that needed no call.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        run_ahead: int = 0,
        timeout: float = 600.0,
        max_connections: int = 64,
    ) -> None:
        if run_ahead < 0:
            raise ValueError(f"run_ahead is {run_ahead}; it must be a number of tokens from 0")
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url is {url!r}; it must begin with http:// or https://")
        self._model, self._run_ahead = model, run_ahead
        self._client = JsonClient(url, api_key, timeout, max_connections)
        self.num_served = 0
        self.loop = LoopThread("specdec-endpoint")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all programs that still run."""
        self.loop.close()
        self._client.close()

    @property
    def num_calls(self) -> int:
        """Number of calls so far."""
        return self._client.num_calls

    async def generate(
        self, transcript: Transcript, asked: Gen, defaults: Mapping[str, Any], on_text: Callable[[str], None]
    ) -> Generated:
        """See `Backend.generate`. The text comes in one part."""
        given = {"max_tokens": DEFAULT_MAX_TOKENS, **defaults, **asked.given}
        params = SamplingParams(**given)
        found = None
        if self._run_ahead and can_run_ahead(given, params):
            found = await self._ahead(transcript, params)
        if found is None:
            reply = await self._complete(transcript, _fields(given))
            found = Generated(reply.text, reply.finish_reason, reply.num_tokens, reply.num_prompt_tokens)
        on_text(found.text)
        return found

    async def score(self, transcript: Transcript, choices: Sequence[str]) -> list[ChoiceScore]:
        """See `Backend.score`."""
        try:
            reply = await self._client.post(
                "/score_choices", self._named({**_prompt(transcript), "choices": list(choices)})
            )
        except EndpointError as error:
            if error.status in (404, 405):
                message = f"{error}; select needs a server with /score_choices, such as `specdec serve`"
                raise EndpointError(message, error.status) from None
            raise
        return [ChoiceScore(one["token_ids"], one["token_logprobs"]) for one in reply["choices"]]

    async def _ahead(self, transcript: Transcript, params: SamplingParams) -> Generated | None:
        """Return the text from an answer that goes further, None if it has to be asked for plainly."""
        served = None if transcript.ahead is None else transcript.ahead.serve(params)
        if served is not None:
            self.num_served += 1
            return _generated(served)
        most = None if params.max_tokens is None else params.max_tokens + self._run_ahead
        reply = await self._complete(transcript, {"temperature": 0, "max_tokens": most}, with_tokens=True)
        tokens = _tokens(reply)
        if tokens is None:
            self._run_ahead = 0
            logger.warning("run_ahead is off: the endpoint's tokens do not make up its text")
            return None
        served = WrittenAhead(tokens, reply.finish_reason == "stop").serve(params)
        return None if served is None else _generated(served, reply.num_prompt_tokens)

    async def _complete(
        self, transcript: Transcript, fields: Mapping[str, Any], *, with_tokens: bool = False
    ) -> _Reply:
        is_chat = transcript.is_conversation
        body = {**fields, **_prompt(transcript)}
        if with_tokens:
            body["logprobs"] = True if is_chat else 0
        path = "/chat/completions" if is_chat else "/completions"
        reply = await self._client.post(path, self._named(body))
        choice, usage = reply["choices"][0], reply.get("usage") or {}
        logprobs, tokens = choice.get("logprobs") or {}, None
        if with_tokens:
            tokens = [one["token"] for one in logprobs.get("content") or ()] if is_chat else logprobs.get("tokens")
        text = choice["message"]["content"] if is_chat else choice["text"]
        counts = usage.get("completion_tokens", 0), usage.get("prompt_tokens")
        return _Reply(text or "", choice.get("finish_reason"), tokens, *counts)

    def _named(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {**body, **({} if self._model is None else {"model": self._model})}


def _prompt(transcript: Transcript) -> dict[str, Any]:
    """Return a transcript as fields of a request."""
    if not transcript.is_conversation:
        return {"prompt": transcript.text}
    goes_on = {"continue_final_message": True, "add_generation_prompt": False} if transcript.text else {}
    return {"messages": transcript.conversation(), **goes_on}


def _fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling parameters as fields of a request, which have their names."""
    return {name: _plain(value) if isinstance(value, _NESTED) else value for name, value in given.items()}


def _plain(value: StructuredOutputsParams | Speculation) -> dict[str, Any]:
    return {field: one for field, one in asdict(value).items() if one is not None}


def _tokens(reply: _Reply) -> list[str] | None:
    """Return the texts of an answer's tokens if they make up its text, without an end token that is no text."""
    tokens = reply.tokens
    if tokens and reply.finish_reason == "stop" and "".join(tokens[:-1]) == reply.text:
        return tokens[:-1]
    return tokens if tokens is not None and "".join(tokens) == reply.text else None


def _generated(served: Served, num_prompt_tokens: int | None = None) -> Generated:
    return Generated(served.text, served.finish_reason, served.num_tokens, num_prompt_tokens, ahead=served.ahead)
