"""Pictures of real runs of the demo model: the coloured terminal, and one draft tree with its accepted path."""

import hashlib
import html
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from specdec.config import DEMO, DEMO_HEAD

if TYPE_CHECKING:
    from specdec.core.outputs import TreeTrace

COMMANDS = (
    ["generate", "--draft", "eagle", "I would like to find a restaurant in San Jose."],
    ["generate", "--temperature", "0.8", "--seed", "1", "Book me a train to Cambridge."],
)
# Equal tokens on every processor, and trees that do not depend on how fast it is.
EXACT = ["--dtype", "float32", "--fixed-drafts"]
WIDTH = 96
# Background, foreground, and the eight colours, of which the command uses green.
THEME = TerminalTheme((24, 27, 32), (225, 225, 225), [(0, 0, 0), (240, 80, 80), (63, 185, 80), *[(160, 160, 160)] * 5])
TREE_PROMPT = "Can you book a table for two people at a restaurant in San Jose for tonight?"
TREE_SHAPE = (5, 4, 14)


def inputs() -> str:
    """Return the hash of what the pictures depend on: commands, prompt and the demo's weights."""
    digest = hashlib.sha256(repr((COMMANDS, EXACT, WIDTH, TREE_PROMPT, TREE_SHAPE)).encode())
    for folder in (DEMO / "target", DEMO_HEAD):
        digest.update((folder / "model.safetensors").read_bytes())
    return digest.hexdigest()


def draw(folder: Path) -> None:
    """Run the demo and write `terminal.svg` and `tree.svg`."""
    mark = f"<!-- specdec-inputs: {inputs()} -->\n"
    (folder / "terminal.svg").write_text(mark + _terminal(), encoding="utf-8")
    (folder / "tree.svg").write_text(mark + _tree(*_find_tree()), encoding="utf-8")


def _terminal() -> str:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "HF_HUB_OFFLINE": "1"}
    for words in COMMANDS:
        shown = " ".join(f'"{word}"' if " " in word else word for word in words)
        console.print(Text(f"$ specdec {shown}", style="bold"), soft_wrap=True)
        command = [sys.executable, "-m", "specdec", *words, *EXACT]
        run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        console.print(Text.from_ansi(run.stdout.strip()))
        console.print()
    picture = console.export_svg(title="specdec", theme=THEME, unique_id="terminal")
    # No fonts from elsewhere: the viewer's own monospace will do.
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)


def _find_tree() -> tuple["TreeTrace", Callable[[int], str]]:
    """Return the tree of the run with the longest accepted path, of several the one with the most branches; and what
    makes text of its tokens.
    """
    # Late: torch takes seconds to import, and nothing else here needs it.
    from specdec import LLM, DraftShape, SamplingParams

    llm = LLM(draft="eagle", dtype="float32", adaptive_drafts=False, shape=DraftShape(*TREE_SHAPE))
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    prompt = llm.chat_prompt([{"role": "user", "content": TREE_PROMPT}])
    *_, answer = llm.stream(prompt, SamplingParams(temperature=0, max_tokens=96), trace=True)
    found = [tree for tree in answer.outputs[0].trace if tree.path and len(tree.path) < len(tree.output)]
    best = max(found, key=lambda tree: (len(tree.path), len({*range(len(tree.tokens))} - {*tree.parents})))
    return best, lambda token: "⟨end⟩" if token in llm.end_tokens else tokenizer.decode([token])


STEP_X, STEP_Y, BOX = 128, 36, 108
LEGEND_X = 230
GREEN, GREY, DARK = "#1b7f5c", "#8c8c8c", "#222222"


def _tree(tree: "TreeTrace", text_of: Callable[[int], str]) -> str:
    """Draw the tree from left to right: one column a depth, one line a leaf."""
    nodes = [-1, *range(len(tree.tokens))]
    children = {node: [child for child, parent in enumerate(tree.parents) if parent == node] for node in nodes}
    depth = {-1: 0}
    for node, parent in enumerate(tree.parents):
        depth[node] = depth[parent] + 1
    height: dict[int, float] = {}
    leaves = 0

    def place(node: int) -> float:
        nonlocal leaves
        if not children[node]:
            height[node] = leaves
            leaves += 1
        else:
            heights = [place(child) for child in children[node]]
            height[node] = heights[0]
        return height[node]

    place(-1)
    last = tree.path[-1]
    bonus_x, bonus_y = depth[last] + 1, height[last]
    if any(depth[node] == bonus_x and height[node] == bonus_y for node in nodes[1:]):
        bonus_y, leaves = leaves, leaves + 1
    accepted = {-1, *tree.path}
    lines, boxes = [], []
    for node in nodes[1:]:
        lines.append(_line(depth[node] - 1, height[tree.parents[node]], depth[node], height[node], node in accepted))
    lines.append(_line(bonus_x - 1, height[last], bonus_x, bonus_y, True, dashed=True))
    for node in nodes:
        text = text_of(tree.root if node < 0 else tree.tokens[node])
        boxes.append(_box(depth[node], height[node], text, GREEN if node in accepted else GREY, is_root=node < 0))
    boxes.append(_box(bonus_x, bonus_y, text_of(tree.output[-1]), DARK, dashed=True))
    width, total = (max(*depth.values(), bonus_x) + 1) * STEP_X + 12, leaves * STEP_Y + 52
    legend = (
        ("root, the last known token", GREEN, True, False),
        ("accepted draft token", GREEN, False, False),
        ("rejected draft token", GREY, False, False),
        ("bonus token of the target", DARK, False, True),
    )
    for index, (text, colour, is_root, dashed) in enumerate(legend):
        x = 12 + index * LEGEND_X
        boxes.append(_shape(x, total - 26, 18, colour, is_root, dashed))
        boxes.append(f'<text x="{x + 26}" y="{total - 12}" font-size="12" fill="{DARK}">{text}</text>')
    width = max(width, 12 + 4 * LEGEND_X)
    size = f'viewBox="0 0 {width} {total}" width="{width}" height="{total}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="monospace">'
    return "\n".join([start, '<rect width="100%" height="100%" fill="white"/>', *lines, *boxes, "</svg>\n"])


def _line(x0: float, y0: float, x1: float, y1: float, is_accepted: bool, dashed: bool = False) -> str:
    left, right = 12 + x0 * STEP_X + BOX, 12 + x1 * STEP_X
    top, bottom = 12 + y0 * STEP_Y + 13, 12 + y1 * STEP_Y + 13
    colour = DARK if dashed else GREEN if is_accepted else GREY
    middle = (left + right) / 2
    style = ' stroke-dasharray="4 3"' if dashed else ""
    return (
        f'<path d="M{left} {top} C{middle} {top} {middle} {bottom} {right} {bottom}" fill="none" stroke="{colour}" '
        f'stroke-width="{2 if is_accepted else 1}"{style}/>'
    )


def _box(x: float, y: float, text: str, colour: str, is_root: bool = False, dashed: bool = False) -> str:
    left, top = 12 + x * STEP_X, 12 + y * STEP_Y
    shown = html.escape(text.replace(" ", "␣").replace("\n", "↵"))
    ink = "white" if is_root else colour
    return (
        _shape(left, top, BOX, colour, is_root, dashed)
        + f'<text x="{left + BOX / 2}" y="{top + 17}" font-size="13" text-anchor="middle" fill="{ink}">{shown}</text>'
    )


def _shape(left: float, top: float, width: float, colour: str, is_filled: bool, dashed: bool) -> str:
    style = ' stroke-dasharray="4 3"' if dashed else ""
    height = 26 if width == BOX else 18
    fill = colour if is_filled else "white"
    return (
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="5" fill="{fill}" '
        f'stroke="{colour}" stroke-width="1.5"{style}/>'
    )
