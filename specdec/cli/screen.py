"""Standard output of a command for people: text and draft trees, coloured on a terminal, plain elsewhere."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.segment import Segment as Piece
from rich.segment import Segments
from rich.style import Style
from rich.text import Text
from rich.tree import Tree

from specdec.core.outputs import TreeTrace
from specdec.text.segment import Segment
from specdec.tool_calls.tagged_calls import Thought

if TYPE_CHECKING:
    from specdec.models.tokenizer import Tokenizer

ACCEPTED = Style(color="green")
OWN = Style()
DIM = Style(dim=True)
BOLD = Style(bold=True)
# Columns; more than any drawing has.
WIDEST = 10_000


class Screen:
    """Standard output.

    Args:
        is_plain: never colour; otherwise a terminal is coloured.
    """

    def __init__(self, is_plain: bool = False) -> None:
        self.console = Console(force_terminal=False if is_plain else None)

    def write(self, *pieces: tuple[str, Style]) -> None:
        """Write pieces of text as they are, each in its style."""
        # Not rich's `Text`, which would expand tabs and drop control characters of the answer.
        self.console.print(Segments([Piece(text, style) for text, style in pieces]), soft_wrap=True, end="")

    def write_segments(self, segments: Sequence[Segment]) -> None:
        """Write text of an answer, accepted draft tokens coloured."""
        self.write(*((piece.text, ACCEPTED if piece.accepted else OWN) for piece in segments))

    def write_items(self, items: Iterable[object], accepted: bool, shows_thinking: bool) -> None:
        """Write text of an answer that thinks: its thinking is dimmed, or left out."""
        style = ACCEPTED if accepted else OWN
        for item in items:
            if isinstance(item, Thought):
                self.write((item.text if shows_thinking else "", style + DIM))
            elif isinstance(item, str):
                self.write((item, style))

    def draw(self, drawing: RenderableType) -> None:
        """Draw something of any width. A narrow terminal breaks its lines, where rich would leave parts out."""
        segments = self.console.render(drawing, self.console.options.update(width=WIDEST))
        self.console.print(Segments(segments), soft_wrap=True, end="")

    def write_legend(self) -> None:
        """Say on a terminal with colours what they mean."""
        if self.console.is_terminal and self.console.color_system and not self.console.no_color:
            self.write(("accepted from the draft", ACCEPTED), (" · ", DIM), ("the target's own\n\n", OWN))


def draw_tree(step: TreeTrace, show: Callable[[int], str], *, ascii_only: bool = False) -> Tree:
    """Draw a step's draft tree under the last known token.

    Accepted tokens are ticked, and green on a terminal. The token that the target added hangs behind the last of them.

    Args:
        show: returns a token as text.
        ascii_only: mark tokens by ASCII characters. rich draws ASCII lines by itself where the output needs them.
    """
    tick, arrow = ("*", "<-") if ascii_only else ("✓", "←")
    drawing = Tree(Text(show(step.root), BOLD), guide_style=DIM)
    branches, path = {-1: drawing}, set(step.path)
    for node, (token, parent) in enumerate(zip(step.tokens, step.parents, strict=True)):
        label = Text(f"{show(token)} {tick}", ACCEPTED) if node in path else Text(show(token), DIM)
        branches[node] = branches[parent].add(label)
    last = step.path[-1] if step.path else -1
    for token in step.output[len(step.path) :]:
        branches[last].add(Text(f"{show(token)} {arrow} the target's own", OWN))
    return drawing


def token_text(tokenizer: "Tokenizer", token: int, *, ascii_only: bool = False) -> str:
    """Return a token's text in quotes; its name in the vocabulary where it is no whole character.

    Args:
        ascii_only: write other characters as escapes.
    """
    return (ascii if ascii_only else repr)(tokenizer.token_texts.name(token))
