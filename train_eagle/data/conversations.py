"""Conversations from files and data sets, with a count of the unusable ones by reason."""

import gzip
import hashlib
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from specdec.core.chat_content import REASONING
from specdec.kernels.types.extras import lacking
from specdec.train_eagle.data.chat_mask import BadConversation, Message

# Also ShareGPT's names.
ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
# `name` or `owner/name`, perhaps with a split.
_DATASET = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")


class Place(NamedTuple):
    """Position of an entry: the source's name, and the line or row in it, counted from 1."""

    source: str
    line: int

    def __str__(self) -> str:
        return f"{self.source}, line {self.line}"


class Entry(NamedTuple):
    """An entry of a source: a JSON value, or the error that kept it from being read."""

    place: Place
    value: object

    def messages(self) -> list[Message]:
        """Return the conversation.

        Raises:
            BadConversation: there is none that can be trained on.
        """
        if isinstance(self.value, BadConversation):
            raise self.value
        return parse(self.value)


class FileSource:
    """A file of JSON objects, one a line or all in one array; with a name in .gz, compressed by gzip.

    Raises:
        ValueError: the file cannot be read.
    """

    def __init__(self, file: Path) -> None:
        self.name = str(file)
        self._file = file
        try:
            file.open("rb").close()
        except OSError as error:
            raise ValueError(f"{file}: cannot be read: {error.strerror}; give a JSONL file or a data set") from None
        if file.suffix == ".parquet":
            raise ValueError(f"{file}: Parquet is read as a data set; give the folder of such files, {file.parent}")

    def digest(self) -> str:
        """Return the SHA-256 of the content, in hex."""
        with self._file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()

    def __iter__(self) -> Iterator[Entry]:
        # A byte that is not UTF-8 becomes a lone surrogate, so that only its own message is refused.
        opened = gzip.open if self._file.suffix == ".gz" else open
        with opened(self._file, "rt", encoding="utf-8-sig", errors="surrogateescape", newline="\n") as lines:
            try:
                first = next((line for line in lines if line.strip()), "")
                lines.seek(0)
                is_array = first.lstrip().startswith("[") and ".jsonl" not in self._file.suffixes
                for line, value in _array(lines.read()) if is_array else _lines(lines):
                    yield Entry(Place(self.name, line), value)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise ValueError(f"{self._file}: cannot be decompressed: {error}; download it again") from None


class DatasetSource:
    """A split of a data set of the Hugging Face `datasets` library, or of a local folder that it can read.

    Args:
        name: as for `datasets.load_dataset`; after a colon the split, which is required if there are several.

    Raises:
        ValueError: it cannot be loaded, or the split is unknown or missing.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        if problem := lacking(f"{name}: a data set", "train", {"datasets": "datasets"}):
            raise ValueError(problem)
        import datasets

        path, _, split = name.partition(":")
        try:
            splits = [split] if split else datasets.get_dataset_split_names(path)
            self._rows: Any = datasets.load_dataset(path, split=splits[0]) if len(splits) == 1 else None
        except Exception as error:  # the hub, the network, a cache or a format may fail
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"{name}: neither a file nor a data set that can be loaded: {reason}") from None
        if self._rows is None:
            raise ValueError(f"{name}: the data set has several splits; give {path}:SPLIT, of {', '.join(splits)}")

    def digest(self) -> str:
        """Return the fingerprint by which `datasets` tells versions of the data apart."""
        return str(self._rows._fingerprint)

    def __iter__(self) -> Iterator[Entry]:
        for row, value in enumerate(self._rows, 1):
            yield Entry(Place(self.name, row), value)


Source = FileSource | DatasetSource


def open_source(name: str | Path) -> Source:
    """Open the file of that name, or else the data set.

    Raises:
        ValueError: neither exists.
    """
    path, text = Path(name), str(name)
    is_folder = Path(text.partition(":")[0]).is_dir()
    names_file = path.suffix in (".json", ".jsonl", ".gz", ".parquet")
    may_be_dataset = is_folder or (_DATASET.fullmatch(text) and not names_file)
    return DatasetSource(text) if may_be_dataset and not path.is_file() else FileSource(path)


def read(sources: Iterable[Source], limit: int | None = None) -> Iterator[Entry]:
    """Yield the entries of all sources in order, at most `limit` of each, without blank lines."""
    for source in sources:
        yield from islice(source, limit)


class BadData:
    """Count of entries, or of answers that are samples of their own, that were left out or cut, by reason.

    Attributes:
        counts: number of them per reason.
        first: the first three entries per reason, as `file:line`.

    Args:
        strict: refuse the first such entry instead of counting it.
    """

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self.counts: Counter[str] = Counter()
        self.first: dict[str, list[str]] = {}

    def add(self, error: BadConversation, place: Place) -> None:
        """Count an entry.

        Raises:
            ValueError: `strict` is set.
        """
        if self.strict:
            raise ValueError(f"{place}: {error}")
        self.counts[error.reason] += 1
        first = self.first.setdefault(error.reason, [])
        if len(first) < 3:
            first.append(f"{place.source}:{place.line}")

    def table(self, title: str = "bad data") -> str:
        """Return a table of the reasons, the most frequent first; empty if there are none."""
        if not self.counts:
            return ""
        width = max(map(len, self.counts))
        rows = [f"{title:{width}}  how many  first at"]
        for reason, count in self.counts.most_common():
            rows.append(f"{reason:{width}}  {count:8,}  {', '.join(self.first[reason])}")
        return "\n".join(rows)


def write_conversations(file: Path, conversations: Sequence[Sequence[Message]]) -> None:
    """Append conversations to a file, one `{"messages": [...]}` per line."""
    with file.open("a", encoding="utf-8") as lines:
        for messages in conversations:
            lines.write(json.dumps({"messages": list(messages)}, ensure_ascii=False) + "\n")


def parse(value: object) -> list[Message]:
    """Return the conversation in an object's `messages` or `conversations`.

    Turns have `role` and `content`, or ShareGPT's `from` and `value`.

    Raises:
        BadConversation: there is no conversation, or none that can be trained on.
    """
    if not isinstance(value, dict):
        raise BadConversation("not a JSON object", f'{_shown(value)}; write it as {{"messages": [...]}}')
    # Data sets may have tools as JSON.
    if value.get("tools") not in (None, [], {}, "", "[]", "{}", "null"):
        raise BadConversation("tools", "prompts and answers with tools are not supported; leave out the conversation")
    turns = _first_of(value, "messages", "conversations")
    if not isinstance(turns, list):
        raise BadConversation("no conversation", "give the turns as a list, in messages or conversations")
    if not turns:
        raise BadConversation("empty conversation", "give at least a question and an answer")
    messages = [_message(turn) for turn in turns]
    if not any(message["role"] == "assistant" for message in messages):
        raise BadConversation("no assistant turn", "there is nothing to train on")
    return messages


def _message(turn: object) -> Message:
    if not isinstance(turn, dict):
        raise BadConversation("turn is no object", f"{_shown(turn)}; give role and content")
    role, content = _first_of(turn, "role", "from"), _first_of(turn, "content", "value")
    if not isinstance(role, str) or role not in ROLES:
        raise BadConversation("unknown role", f"{_shown(role)}; use {', '.join(ROLES)}")
    thinking = next((turn[key] for key in REASONING if turn.get(key)), "")
    for name, text in (("content", content), ("reasoning_content", thinking)):
        if not isinstance(text, str):
            raise BadConversation(f"{name} is no string", f"{_shown(text)} of the {role}; give its text")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadConversation(
                f"{name} is no UTF-8 text", f"{error.reason} at character {error.start + 1}"
            ) from None
    if turn.get("tool_calls"):
        raise BadConversation("tool calls", "calls of tools are not supported; leave out the conversation")
    if not content.strip():
        raise BadConversation("empty content", f"the {role} says nothing; leave out the turn or the conversation")
    message = {"role": ROLES[role], "content": content}
    return message | dict.fromkeys(REASONING, thinking) if thinking.strip() else message


def _first_of(value: dict[str, Any], *keys: str) -> Any:
    """Return the first value that is given; a column that a row of a data set lacks is None."""
    return next((value[key] for key in keys if value.get(key) is not None), None)


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:59] + "…"


def _lines(lines: Iterable[str]) -> Iterator[tuple[int, object]]:
    """Yield line numbers and values; for a line that is no JSON, the error."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                yield number, BadConversation("malformed JSON", f"{error.msg} at column {error.colno}")
            except (ValueError, RecursionError) as error:  # numbers too long or nesting too deep for Python
                yield number, BadConversation("malformed JSON", str(error))


def _array(text: str) -> Iterator[tuple[int, object]]:
    """Yield line numbers and values of an array's elements, and the error if the array breaks off."""
    decoder, gap = json.JSONDecoder(), re.compile(r"[\s,]*")
    line, at, end = 1, 0, text.index("[") + 1
    while True:
        start = gap.match(text, end).end()  # type: ignore[union-attr]  # it matches nothing, too
        line += text.count("\n", at, start)
        at = start
        if text[at : at + 1] == "]":
            return
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            yield line, BadConversation("malformed JSON", "the array breaks off here; what follows is not read")
            return
        yield line, value
