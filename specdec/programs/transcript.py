"""The text or conversation that a program has made so far."""

from dataclasses import dataclass, replace
from typing import NamedTuple


class ProgramMessage(NamedTuple):
    """A message of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class Transcript:
    """A text, or a conversation whose last message may be open. It never changes, so branches share it.

    Attributes:
        messages: closed messages.
        role: role of the open message, None outside of messages.
        text: text of the open message; without messages, the whole text.
    """

    messages: tuple[ProgramMessage, ...] = ()
    role: str | None = None
    text: str = ""

    @property
    def is_conversation(self) -> bool:
        """True if the text is in messages of roles."""
        return bool(self.messages) or self.role is not None

    def with_text(self, text: str) -> "Transcript":
        """Return the transcript with constant text behind it.

        Raises:
            ValueError: text between the messages of a conversation.
        """
        if self.messages and self.role is None and text:
            raise ValueError(f"the text {text!r:.50} follows a message; in a conversation, put all text into roles")
        return self.with_output(text)

    def with_output(self, text: str) -> "Transcript":
        """Return the transcript with the model's text behind it."""
        return replace(self, text=self.text + text)

    def begun(self, role: str) -> "Transcript":
        """Return the transcript with an open message.

        Raises:
            ValueError: within a message, or behind text outside of messages.
        """
        if self.role is not None:
            raise ValueError(f"a message of {role!r} begins within one of {self.role!r}; end that first")
        if self.text:
            raise ValueError(f"a message of {role!r} follows the text {self.text[-50:]!r}; put all text into roles")
        return replace(self, role=role)

    def ended(self) -> "Transcript":
        """Return the transcript with its open message closed."""
        assert self.role is not None, "a message that has not begun ends"
        return Transcript((*self.messages, ProgramMessage(self.role, self.text)))

    def check_output(self) -> None:
        """Refuse places in which the model writes nothing.

        Raises:
            ValueError: outside of the assistant's message in a conversation.
        """
        if self.is_conversation and self.role != "assistant":
            place = f"a message of {self.role!r}" if self.role else "no message"
            raise ValueError(f"gen or select in {place}; in a conversation, put them into assistant(...)")

    def conversation(self) -> list[dict[str, str]]:
        """Return the messages as chat templates read them, an open one with text included."""
        open_one = [ProgramMessage(self.role, self.text)] if self.role is not None and self.text else []
        return [message._asdict() for message in (*self.messages, *open_one)]

    def shown(self) -> str:
        """Return the text; of a conversation, a line with its role for each message."""
        if not self.is_conversation:
            return self.text
        return "\n".join(f"{message['role']}: {message['content']}" for message in self.conversation())
