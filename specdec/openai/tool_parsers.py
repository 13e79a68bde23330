"""Tool calls in the text of an answer, in the forms of Hermes and of Llama 3. Text may come in pieces of any size."""

from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol

from specdec.core.call_grammar import HERMES, LISTED, LLAMA3, CallForm, form_name
from specdec.core.tool_choice import ToolChoice
from specdec.openai.tool_call_reader import CallArguments, CallPiece, CallReader, CallStart, Reading

Item = str | CallPiece
_SPACE = " \t\r\n"
# Between calls behind one tag.
_SEPARATORS = ",;"


class ToolParser(Protocol):
    """Separates the calls of one answer from its text.

    All that is not part of a call is returned as text, but for tags of calls, and for white space between calls, before
    them and after the last one.

    Attributes:
        TAGS: tags of calls, which may be special tokens of a tokenizer.
        FORM: form in which calls are forced; None where the parser has none of its own.
    """

    TAGS: ClassVar[tuple[str, ...]]
    FORM: ClassVar[CallForm | None]

    def push(self, text: str) -> list[Item]:
        """Take new text; return the text and the pieces of calls that it holds, in order."""
        ...

    def finish(self) -> list[Item]:
        """Return the items that are left at the answer's end. A call whose name is incomplete is returned as text."""
        ...


class PlainText:
    """An answer without calls."""

    TAGS: ClassVar[tuple[str, ...]] = ()
    FORM: ClassVar[CallForm | None] = None

    def push(self, text: str) -> list[Item]:
        return [text] if text else []

    def finish(self) -> list[Item]:
        return []


class FirstCall:
    """Parser that drops all calls but the first, for `parallel_tool_calls` false."""

    TAGS: ClassVar[tuple[str, ...]] = ()
    FORM: ClassVar[CallForm | None] = None

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self._num_calls = 0

    def push(self, text: str) -> list[Item]:
        return list(self._kept(self._parser.push(text)))

    def finish(self) -> list[Item]:
        return list(self._kept(self._parser.finish()))

    def _kept(self, items: Sequence[Item]) -> Iterator[Item]:
        for item in items:
            self._num_calls += isinstance(item, CallStart)
            if isinstance(item, str) or self._num_calls <= 1:
                yield item


class NamedCall:
    """An answer that is the arguments of one function."""

    TAGS: ClassVar[tuple[str, ...]] = ()
    FORM: ClassVar[CallForm | None] = None

    def __init__(self, name: str) -> None:
        self._name, self._has_begun = name, False

    def push(self, text: str) -> list[Item]:
        if not text:
            return []
        start: list[Item] = [] if self._has_begun else [CallStart(self._name)]
        self._has_begun = True
        return [*start, CallArguments(text)]

    def finish(self) -> list[Item]:
        return []


class _TaggedCalls:
    """Calls behind a tag, one or several, of which each is a JSON object.

    A tag is one of calls if an object follows it, and text otherwise: answers may speak of tags.
    """

    TAGS: ClassVar[tuple[str, ...]]
    FORM: ClassVar[CallForm | None]
    OPEN: ClassVar[str]
    # Empty: only other text ends the calls.
    CLOSE: ClassVar[str] = ""
    # Whether an answer begins as if behind a tag.
    BEGINS_INSIDE: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        cls.TAGS = tuple(tag for tag in (cls.OPEN, cls.CLOSE) if tag)

    def __init__(self) -> None:
        self._unread = ""
        self._is_inside = self.BEGINS_INSIDE
        # Text before a possible call, a tag and white space: text after all if it is none.
        self._held = ""
        self._call: CallReader | None = None
        # Calls and objects behind this tag. After a call, a closing tag may come late.
        self._has_call = self._has_object = False
        # Whether the last item was a call.
        self._is_after_call = False

    def push(self, text: str) -> list[Item]:
        self._unread += text
        return self._take(is_end=False)

    def finish(self) -> list[Item]:
        return self._take(is_end=True)

    def _take(self, is_end: bool) -> list[Item]:
        self._items: list[Item] = []
        while self._step(is_end):
            pass
        return self._items

    def _step(self, is_end: bool) -> bool:
        """Read up to the next change of state; return whether there was one. The end alone decides what is open."""
        if self._call is not None:
            return self._read_call(self._call, is_end)
        return self._read_inside(is_end) if self._is_inside else self._read_text(is_end)

    def _give(self, text: str) -> None:
        """Return text, without white space that follows a call."""
        if text and not (self._is_after_call and text.isspace()):
            self._items.append(text)
            self._is_after_call = False

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
        rest = self._unread.lstrip(_SPACE + (_SEPARATORS if self._has_object else ""))
        white = self._unread[: len(self._unread) - len(rest)]
        is_behind_call = self._is_after_call and not self._held
        before = "" if is_behind_call else self._held + white
        if rest.startswith("{"):
            self._held, self._unread, self._call = before, rest, CallReader()
        elif self.CLOSE and rest.startswith(self.CLOSE):
            self._give(before if self._has_call else before + self.CLOSE)
            self._leave(rest.removeprefix(self.CLOSE))
            self._has_call = False
        elif rest.startswith(self.OPEN):
            self._unread = rest.removeprefix(self.OPEN)
            self._enter(before)
        elif is_end or not any(tag.startswith(rest) for tag in (self.OPEN, self.CLOSE)):
            self._give(before)
            self._leave(self._unread if is_behind_call and rest else rest)
        else:
            return False
        return True

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


class HermesParser(_TaggedCalls):
    """Calls as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen and others."""

    FORM: ClassVar[CallForm | None] = HERMES
    OPEN, CLOSE = HERMES.opening, HERMES.closing


class LlamaParser(_TaggedCalls):
    """Calls as `{"name": ..., "parameters": {...}}`, at the answer's beginning or behind a tag: Llama 3."""

    FORM: ClassVar[CallForm | None] = LLAMA3
    OPEN = "<|python_tag|>"
    BEGINS_INSIDE = True


class ListedCalls(_TaggedCalls):
    """Calls as a JSON list of `{"name": ..., "parameters": {...}}`: forced ones of a model without a known form."""

    FORM: ClassVar[CallForm | None] = LISTED
    OPEN, CLOSE = LISTED.first, LISTED.last


def parser_for(choice: str, template: str) -> type[ToolParser]:
    """Return the parser of a setting's name.

    Args:
        template: text of the model's chat template, by which "auto" recognises the form.
    """
    if choice == "auto":
        choice = form_name(template)
    parsers: dict[str, type[ToolParser]] = {"hermes": HermesParser, "llama3_json": LlamaParser, "none": PlainText}
    return parsers[choice]


class ToolUse(Protocol):
    """The fields of a request that concern tools."""

    @property
    def calls(self) -> ToolChoice:
        """Calls that the request wants."""
        ...

    @property
    def is_single_call(self) -> bool:
        """Return whether the answer may hold one call only."""
        ...


def parser_of_answer(kind: type[ToolParser], body: ToolUse) -> ToolParser:
    """Return the parser of the answer to a request, by the server's form of calls."""
    calls = body.calls
    if calls.mode == "none":
        return PlainText()
    if kind.FORM is None and calls.is_forced:
        return NamedCall(calls.names[0]) if calls.mode == "named" and calls.names else ListedCalls()
    return FirstCall(kind()) if body.is_single_call else kind()


def begun_tag(text: str, tag: str) -> int:
    """Return the length of the text's end that may begin a tag."""
    most = min(len(text), len(tag) - 1)
    return next((size for size in range(most, 0, -1) if tag.startswith(text[-size:])), 0)


def _held_back(text: str, tag: str) -> int:
    """Return the length of the text's end that may begin a tag, with the white space before it."""
    size = begun_tag(text, tag)
    rest = text[: len(text) - size]
    return size + len(rest) - len(rest.rstrip())
