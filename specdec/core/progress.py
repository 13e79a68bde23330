"""The progress bar of a command or a call."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress_bar(total: int, what: str, hidden: bool = False) -> Iterator[Callable[[], None]]:
    """Show a bar on standard error while the work lasts; yields what advances it.

    There is none where standard error is no terminal, or for a single item.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    disable = hidden or total < 2 or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disable) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)
