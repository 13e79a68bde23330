"""The progress bar of a command or a call."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from specdec.core.outputs import SpeculationStats


class SpeedColumn(ProgressColumn):
    """Tokens per second since the start, and tau.

    Args:
        figures: returns the figures of all requests so far; it is called where the bar is drawn.
        tree: bounds of the draft trees, as they stand beside tau.
    """

    max_refresh = 0.5

    def __init__(self, figures: Callable[[], SpeculationStats], tree: str = "") -> None:
        super().__init__()
        self._figures, self._tree = figures, f" ({tree})" if tree else ""

    def render(self, task: Task) -> Text:
        """Return the text of the column."""
        stats = self._figures()
        speed = f"{stats.tokens / task.elapsed:.0f} tok/s" if task.elapsed else "- tok/s"
        return Text(f"{speed}, tau {stats.tau:.2f}{self._tree}" if stats.steps else speed)


@contextmanager
def progress_bar(
    total: int, what: str, hidden: bool = False, figures: Callable[[], SpeculationStats] | None = None, tree: str = ""
) -> Iterator[Callable[[], None]]:
    """Show a bar on standard error while the work lasts, with the time that is left; yields what advances it.

    There is none where standard error is no terminal, or for a single item.

    Args:
        figures: of the requests so far, for their speed and tau.
        tree: bounds of the draft trees, as they stand beside tau.
    """
    console = Console(stderr=True)
    columns: list[ProgressColumn] = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    ]
    if figures is not None:
        columns.append(SpeedColumn(figures, tree))
    disable = hidden or total < 2 or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disable) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)
