"""The thinking at an answer's beginning, apart from what follows it. Text may come in pieces of any size."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specdec.core.reasoning import ReasoningParser, reasoning_parser
from specdec.core.sampling_params import SamplingParams
from specdec.tool_calls.tagged_calls import Item, SteppedParser, Thought, ToolParser, begun_tag

if TYPE_CHECKING:
    # They import transformers and numpy, which the command line's help does without.
    from specdec.models.tokenizer import Tokenizer
    from specdec.verify.thinking_state import ThinkingMarks


@dataclass(frozen=True)
class ServedReasoning:
    """Reasoning parser of the served model, and its marks as tokens.

    Attributes:
        parser: texts of its marks.
        marks: their tokens.
    """

    parser: type[ReasoningParser]
    marks: "ThinkingMarks"

    @classmethod
    def of(cls, name: str | None, marks: "ThinkingMarks | None") -> "ServedReasoning | None":
        """Return how a model with a `reasoning_parser` thinks, None without."""
        return None if name is None or marks is None else cls(reasoning_parser(name), marks)

    def begin(
        self, params: SamplingParams, tokenizer: "Tokenizer", prompt: list[int], template_arguments: dict[str, Any]
    ) -> None:
        """Set whether the answer to a conversation begins with thinking, and keep the marks in its text.

        Args:
            prompt: tokens of the conversation.
            template_arguments: what its chat template got.
        """
        if params.reasoning_ended is None:
            # What continues an answer is no thinking, unless that has begun in it.
            last, goes_on = self.marks.last(prompt), template_arguments.get("continue_final_message")
            ended = last != self.marks.start if goes_on else last == self.marks.end
            params.reasoning_ended = ended or not self.parser.is_enabled(template_arguments)
        tags = tokenizer.special_named((self.parser.START, self.parser.END, *self.parser.ALSO_END))
        if tags and not params.reasoning_ended:
            params.kept_special_tokens = sorted({*(params.kept_special_tokens or ()), *tags.values()})


class ThinkingText(SteppedParser):
    """Parser of an answer that begins with thinking, which it returns as `Thought`s. Another one reads the rest.

    Marks are left out, and all other text is kept. Without an end mark all of it is thinking.

    Args:
        answer: reads what follows the thinking.
        ends_at_calls: whether the model may leave the end mark out before a tool call.
    """

    def __init__(self, parser: type[ReasoningParser], answer: ToolParser, *, ends_at_calls: bool) -> None:
        super().__init__()
        self._answer = answer
        self._start, self._end = parser.START, parser.END
        self._ends = [parser.END, *(parser.ALSO_END if ends_at_calls else ())]
        self._has_begun = self._has_ended = False

    def finish(self) -> list[Item]:
        """See `ToolParser.finish`."""
        return [*super().finish(), *self._answer.finish()]

    def _step(self, is_end: bool) -> bool:
        if self._has_ended:
            self._items += self._answer.push(self._unread)
            self._unread = ""
            return False
        if not self._has_begun and not self._begin(is_end):
            return False
        found = [(place, end) for end in self._ends if (place := self._unread.find(end)) >= 0]
        if not found:
            self._think(len(self._unread) - (0 if is_end else max(begun_tag(self._unread, end) for end in self._ends)))
            return False
        place, end = min(found)
        self._think(place)
        self._has_ended = True
        if end == self._end:
            self._unread = self._unread.removeprefix(end)
        return True

    def _begin(self, is_end: bool) -> bool:
        """Leave out a start mark at the beginning; return False while it may still come."""
        text = self._unread.lstrip()
        if self._start.startswith(text) and text != self._start and not is_end:
            return False
        self._has_begun = True
        if text.startswith(self._start):
            self._unread = text.removeprefix(self._start)
        return True

    def _think(self, count: int) -> None:
        text, self._unread = self._unread[:count], self._unread[count:]
        if text:
            self._items.append(Thought(text))
