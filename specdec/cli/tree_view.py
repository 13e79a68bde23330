"""A draft tree, drawn in the terminal."""

from collections.abc import Callable

from rich.text import Text
from rich.tree import Tree

from specdec.cli.screen import ACCEPTED, BOLD, DIM, OWN
from specdec.core.outputs import TreeTrace
from specdec.models.tokenizer import Tokenizer


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


def token_text(tokenizer: Tokenizer, token: int, *, ascii_only: bool = False) -> str:
    """Return a token's text in quotes; its name in the vocabulary where it is no whole character.

    Args:
        ascii_only: write other characters as escapes.
    """
    return (ascii if ascii_only else repr)(tokenizer.token_texts.name(token))
