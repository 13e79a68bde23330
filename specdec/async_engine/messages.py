"""Messages between an `AsyncLLM` and its engine process.

Each is a typed msgspec struct, encoded as MessagePack. Only `Setup`, which starts the process, is pickled.
"""

import logging
import os
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

from specdec.building.llm_settings import LLMSettings
from specdec.core.choices import ChoiceScore
from specdec.core.engine_stats import EngineStats
from specdec.core.lora_request import LoRARequest
from specdec.core.outputs import Logprob, RequestMetrics, Segment, SpeculationStats, Step
from specdec.core.sampling_params import SamplingParams

# Messages that may wait on either side of a connection. Further news are merged.
MOST_MESSAGES = 16


class Setup(NamedTuple):
    """Start-up settings of an engine process.

    Attributes:
        model, draft, settings: as `LLM` takes them.
        folder: the working folder, to which relative paths belong.
        log_level: level of the front end's logger `specdec`.
    """

    model: str | Path | None
    draft: str | Path | None
    settings: LLMSettings
    folder: str
    log_level: int

    @classmethod
    def of(cls, model: str | Path | None, draft: str | Path | None, settings: LLMSettings) -> Self:
        """Add the state of this process."""
        return cls(model, draft, settings, os.getcwd(), logging.getLogger("specdec").getEffectiveLevel())


class Message(msgspec.Struct, array_like=True, tag=True):
    """A message; its first field is its type."""


class Add(Message):
    """Run a request.

    Attributes:
        number: names the request, and never another one.
        params: encoded `SamplingParams`. They are decoded apart, so that a mistake in them can be answered.
        interval: seconds for which news after the first token may wait; infinity for none until the end.
        trace: whether deltas hold all steps with their draft trees.
        adapter: of the target, for this request.
        client: name of the client that sent it.
    """

    number: int
    prompt: list[int]
    params: msgspec.Raw
    priority: int
    cache_salt: str | None
    interval: float = 0.0
    trace: bool = False
    adapter: LoRARequest | None = None
    client: str = ""


class Abort(Message):
    """End a request. Its last delta follows."""

    number: int


class GetStats(Message):
    """Send `Stats`."""

    call_id: int


class CheckIntegrity(Message):
    """Check the scheduler and the cache, and send `Integrity`."""

    call_id: int


class UpdateDraft(Message):
    """Replace the draft head, and send `DraftUpdated`."""

    call_id: int
    folder: str


class LoadAdapter(Message):
    """Load an adapter, and send `AdapterChanged`."""

    call_id: int
    adapter: LoRARequest


class UnloadAdapter(Message):
    """Unload an adapter, and send `AdapterChanged`."""

    call_id: int
    lora_int_id: int


class Stop(Message):
    """Abort all requests, send their last deltas, and exit."""


class Ready(Message):
    """The model is loaded."""


class Failed(Message):
    """The engine process exits.

    Attributes:
        reason: one line.
        is_refusal: whether a setting or a file is at fault.
    """

    reason: str
    is_refusal: bool


class Heartbeat(Message):
    """The engine process works on requests, whether or not a step gave tokens."""


class Refused(Message):
    """A request was not queued.

    Attributes:
        queue_full: whether it may succeed later.
    """

    number: int
    reason: str
    queue_full: bool


class Delta(Message, omit_defaults=True):
    """News of one sample of a request since its last delta; see `CompletionOutput` and `RequestOutput`.

    Attributes:
        held: text behind all segments so far, which a stop string may still cut off.
        stats: figures so far.
        num_cached_tokens, metrics: in the first and the last delta of the request.
        choices: in the last delta.
    """

    number: int
    index: int
    token_ids: list[int]
    accepted: list[bool]
    segments: list[Segment]
    held: str
    stats: SpeculationStats
    steps: list[Step]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None
    metrics: RequestMetrics | None = None
    choices: list[ChoiceScore] | None = None


class News(Message):
    """Deltas of a step, or of several where they could not be sent earlier."""

    deltas: list[Delta]


class Stats(Message):
    """Answer to `GetStats`."""

    call_id: int
    stats: EngineStats


class Integrity(Message):
    """Answer to `CheckIntegrity`.

    Attributes:
        problem: the first invariant that does not hold, if any.
        requests: requests that the engine process knows.
        blocks: cache blocks that are held, those in host memory included.
    """

    call_id: int
    problem: str | None
    requests: int
    blocks: int


class DraftUpdated(Message):
    """Answer to `UpdateDraft`.

    Attributes:
        problem: why the present head goes on, if it does.
    """

    call_id: int
    problem: str | None


class AdapterChanged(Message):
    """Answer to `LoadAdapter` and `UnloadAdapter`.

    Attributes:
        problem: why the adapter was not loaded, if so.
        queue_full: whether it may be later.
        was_loaded: whether the adapter that was unloaded was loaded before.
    """

    call_id: int
    problem: str | None = None
    queue_full: bool = False
    was_loaded: bool = False


class Log(Message):
    """A record of the engine process's log."""

    logger: str
    level: int
    text: str


ToEngine = Add | Abort | GetStats | CheckIntegrity | UpdateDraft | LoadAdapter | UnloadAdapter | Stop
FromEngine = Ready | Failed | Heartbeat | Refused | News | Stats | Integrity | DraftUpdated | AdapterChanged | Log


def _plain(value: Any) -> Any:
    """Return numbers and collections of other libraries as Python's."""
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Iterable):
        return list(value)
    raise ValueError(f"a sampling parameter holds {value!r}, which cannot be sent to the engine process")


def one_line(error: BaseException) -> str:
    """Return the first line of an error's message, as text that can be sent."""
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return line.encode(errors="backslashreplace").decode()


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
decode_params = msgspec.msgpack.Decoder(SamplingParams).decode
decode_to_engine = msgspec.msgpack.Decoder[ToEngine](ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder[FromEngine](FromEngine).decode
