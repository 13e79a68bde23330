"""Messages between an `AsyncLLM` and its engine process: commands and replies with their numbers, and its state.

Each is a typed msgspec struct, encoded as MessagePack. Only `Setup`, which starts the process, is pickled.
"""

import logging
import os
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple, Self, get_args

import msgspec

from specdec.building.llm_settings import LLMSettings
from specdec.core.commands import AnyCommand, AnyReply, EngineCommand, EngineReply

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


class Call(Message):
    """Carry out a command.

    Attributes:
        number: names the call, and never another one.
        command: encoded. It is decoded apart, so that a mistake in it can be answered.
    """

    number: int
    command: msgspec.Raw


class Cancel(Message):
    """End a call. One of a request ends with the news of its abortion."""

    number: int


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


class ReplyTo(NamedTuple):
    """A reply on its way.

    Attributes:
        number: that of the call.
        is_last: whether no other follows.
        kind: name of the reply's class.
        encoded: the reply; of one made in this process, the object itself, which nobody may change.
    """

    number: int
    is_last: bool
    kind: str
    encoded: msgspec.Raw

    @classmethod
    def of(cls, number: int, is_last: bool, reply: EngineReply) -> Self:
        """Return a reply of this process, which is encoded with its message."""
        return cls(number, is_last, type(reply).__name__, reply)  # type: ignore[arg-type]

    def reply(self) -> EngineReply:
        """Return the reply itself."""
        given: Any = self.encoded
        reply: EngineReply = _DECODERS[self.kind].decode(given) if isinstance(given, msgspec.Raw) else given
        return reply


class Replies(Message):
    """Replies to several calls."""

    replies: list[ReplyTo]


class Log(Message):
    """A record of the engine process's log."""

    logger: str
    level: int
    text: str


ToEngine = Call | Cancel
FromEngine = Ready | Failed | Heartbeat | Replies | Log


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


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
decode_to_engine = msgspec.msgpack.Decoder[ToEngine](ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder[FromEngine](FromEngine).decode
decode_replies = msgspec.msgpack.Decoder[list[ReplyTo]](list[ReplyTo]).decode
decode_reply_to = msgspec.msgpack.Decoder[ReplyTo](ReplyTo).decode
_decode_named = msgspec.msgpack.Decoder[tuple[str, msgspec.Raw]](tuple[str, msgspec.Raw]).decode
_DECODERS = {kind.__name__: msgspec.msgpack.Decoder(kind) for kind in (*get_args(AnyCommand), *get_args(AnyReply))}


def encode_command(command: EngineCommand) -> bytes:
    """Encode a command, behind the name of its class."""
    return encode((type(command).__name__, command))


def decode_command(data: bytes | msgspec.Raw) -> AnyCommand:
    """Return a command.

    Raises:
        Exception: it is none.
    """
    name, body = _decode_named(data)
    command: AnyCommand = _DECODERS[name].decode(body)
    return command
