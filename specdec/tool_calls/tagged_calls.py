"""Tool calls behind tags, each of which is a JSON object. Text may come in pieces of any size."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from specdec.core.call_forms import HERMES, LISTED, LLAMA3, CallForm
from specdec.tool_calls.tool_call_reader import CallPiece, CallReader, Reading


class Thought(NamedTuple):
    """A piece of an answer's thinking."""

    text: str


Item = str | CallPiece | Thought
_SPACE = " \t\r\n"


class ToolParser(ABC):
    """Separates the calls of one answer from its text.

    All that is not part of a call is returned as text, but for tags of calls, and for white space between calls, before
    them and after the last one.

    Attributes:
        TAGS: tags of calls, which may be special tokens of a tokenizer.
        FORM: form in which calls are forced; None where the parser has none of its own.
    """

    TAGS: ClassVar[tuple[str, ...]] = ()
    FORM: ClassVar[CallForm | None] = None

    def __init__(self, functions: Sequence[Mapping[str, Any]] = ()) -> None:  # noqa: B027
        """Make the parser of one answer.

        Args:
            functions: OpenAI's objects of those that may be called.
        """

    @abstractmethod
    def push(self, text: str) -> list[Item]:
        """Take new text; return the text and the pieces of calls that it holds, in order."""

    def finish(self) -> list[Item]:
        """Return the items that are left at the answer's end. A call whose name is incomplete is returned as text."""
        return []


class SteppedParser(ToolParser):
    """Parser that reads its text in steps, of which each ends with a change of state; see `ToolParser`."""

    def __init__(self) -> None:
        self._unread = ""
        self._items: list[Item] = []
        # Whether the last item was a call.
        self._is_after_call = False

    def push(self, text: str) -> list[Item]:
        """See `ToolParser.push`."""
        self._unread += text
        return self._take(is_end=False)

    def finish(self) -> list[Item]:
        """See `ToolParser.finish`."""
        return self._take(is_end=True)

    def _take(self, is_end: bool) -> list[Item]:
        self._items = []
        while self._step(is_end):
            pass
        return self._items

    @abstractmethod
    def _step(self, is_end: bool) -> bool:
        """Read up to the next change of state; return whether there was one. The end alone decides what is open."""

    def _give(self, text: str) -> None:
        """Return text, without white space that follows a call."""
        if text and not (self._is_after_call and text.isspace()):
            self._items.append(text)
            self._is_after_call = False


class TaggedCalls(SteppedParser):
    """Calls behind a tag, one or several, of which each is a JSON object.

    A tag is one of calls if an object follows it, and text otherwise: answers may speak of tags.
    """

    OPEN: ClassVar[str]
    # Empty: only other text ends the calls.
    CLOSE: ClassVar[str] = ""
    # Tags within calls.
    INNER: ClassVar[tuple[str, ...]] = ()
    # What may stand before a tag's first object and behind each, besides white space.
    BEFORE: ClassVar[str] = ""
    BEHIND: ClassVar[str] = ",;"
    # Whether an answer begins as if behind a tag.
    BEGINS_INSIDE: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        cls.TAGS = tuple(tag for tag in (cls.OPEN, cls.CLOSE, *cls.INNER) if tag)

    def __init__(self, functions: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__()
        # Where a call needs no tag, an answer in JSON may look like one of a function that is not offered.
        self._names = frozenset(str(each.get("name")) for each in functions) if self.BEGINS_INSIDE else None
        self._is_inside = self.BEGINS_INSIDE
        # Text before a possible call, a tag and white space: text after all if it is none.
        self._held = ""
        self._call: CallReader | None = None
        # Calls and objects behind this tag. After a call, a closing tag may come late.
        self._has_call = self._has_object = False

    def _step(self, is_end: bool) -> bool:
        if self._call is not None:
            return self._read_call(self._call, is_end)
        return self._read_inside(is_end) if self._is_inside else self._read_text(is_end)

    def _read_text(self, is_end: bool) -> bool:
        tags = [self.OPEN, self.CLOSE] if self._has_call and self.CLOSE else [self.OPEN]
        places = [(self._unread.index(tag), tag) for tag in tags if tag in self._unread]
        if not places:
            kept = 0 if is_end else max(_held_back(self._unread, tag) for tag in tags)
            end = len(self._unread) - kept
            self._give(self._unread[:end])
            self._unread = self._unread[end:]
            return False
        place, tag = min(places)
        before, self._unread = self._unread[:place], self._unread[place + len(tag) :]
        if tag == self.OPEN:
            self._enter(before)
        else:
            self._give(before)
            self._has_call = False
        return True

    def _enter(self, before: str) -> None:
        """Go on behind an opening tag."""
        text = before.rstrip()
        self._give(text)
        self._held = before[len(text) :] + self.OPEN
        self._is_inside, self._has_call, self._has_object = True, False, False

    def _read_inside(self, is_end: bool) -> bool:
        """Read between an opening tag and an object, or behind an object."""
        rest = self._unread.lstrip(_SPACE + (self.BEHIND if self._has_object else self.BEFORE))
        white = self._unread[: len(self._unread) - len(rest)]
        rest, may_be_call = self._as_object(rest)
        is_behind_call = self._is_after_call and not self._held
        before = "" if is_behind_call else self._held + white
        if rest.startswith("{"):
            self._held, self._unread, self._call = before, rest, CallReader(self._names)
        elif self.CLOSE and rest.startswith(self.CLOSE):
            self._give(before if self._has_call else before + self.CLOSE)
            self._leave(rest.removeprefix(self.CLOSE))
            self._has_call = False
        elif rest.startswith(self.OPEN):
            self._unread = rest.removeprefix(self.OPEN)
            self._enter(before)
        elif is_end or not (may_be_call or any(tag.startswith(rest) for tag in (self.OPEN, self.CLOSE))):
            self._give(before)
            self._leave(self._unread if is_behind_call and rest else rest)
        else:
            return False
        return True

    def _as_object(self, text: str) -> tuple[str, bool]:
        """Return text that may begin a call with the head of a JSON object, and whether it may get one yet."""
        return text, False

    def _leave(self, unread: str) -> None:
        self._is_inside, self._held, self._unread = False, "", unread

    def _read_call(self, call: CallReader, is_end: bool) -> bool:
        pieces = call.push(self._unread)
        self._items += pieces
        self._unread = ""
        if pieces:
            self._held = ""
            self._has_call = self._has_object = self._is_after_call = True
        if call.reading is Reading.OPEN and not is_end:
            return False
        self._call = None
        if call.reading is Reading.OBJECT:
            self._give(self._held + call.take_object())
            self._held, self._unread, self._has_object = "", call.unread, True
        elif call.has_begun:
            self._unread = call.unread
        else:
            # A brace of text; calls may follow.
            self._give(self._held + call.unread[:1])
            self._leave(call.unread[1:])
        return True


class HermesParser(TaggedCalls):
    """Calls as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen and others."""

    FORM: ClassVar[CallForm | None] = HERMES
    OPEN, CLOSE = HERMES.opening, HERMES.closing


class LlamaParser(TaggedCalls):
    """Calls as `{"name": ..., "parameters": {...}}`, at the answer's beginning or behind a tag: Llama 3."""

    FORM: ClassVar[CallForm | None] = LLAMA3
    OPEN = "<|python_tag|>"
    BEGINS_INSIDE = True


class ListedCalls(TaggedCalls):
    """Calls as a JSON list of `{"name": ..., "parameters": {...}}`: forced ones of a model without a known form."""

    OPEN, CLOSE = LISTED.first, LISTED.last


def begun_tag(text: str, tag: str) -> int:
    """Return the length of the text's end that may begin a tag."""
    most = min(len(text), len(tag) - 1)
    return next((size for size in range(most, 0, -1) if tag.startswith(text[-size:])), 0)


def _held_back(text: str, tag: str) -> int:
    """Return the length of the text's end that may begin a tag, with the white space before it."""
    size = begun_tag(text, tag)
    rest = text[: len(text) - size]
    return size + len(rest) - len(rest.rstrip())
