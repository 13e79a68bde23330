"""The text of a branch while it grows, for readers in other threads."""

import threading
from collections.abc import Callable, Iterator


class TextPieces:
    """Pieces of text in order, each with the variable that it belongs to.

    Args:
        changed: guards the pieces, and wakes readers; the streams of a run share it, as they end with the run.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._pieces: list[tuple[str | None, str]] = []
        self._changed = changed

    def add(self, name: str | None, text: str) -> None:
        """Append a piece.

        Args:
            name: variable that it belongs to, None for constant text.
        """
        with self._changed:
            self._pieces.append((name, text))
            self._changed.notify_all()

    def notify(self) -> None:
        """Have the readers of all streams of the run look whether their stream has ended."""
        with self._changed:
            self._changed.notify_all()

    def read(self, has_ended: Callable[[], bool]) -> Iterator[tuple[str | None, str]]:
        """Yield all pieces from the beginning on, and wait for further ones.

        Args:
            has_ended: whether no piece follows; asked again after `notify`.
        """
        place = 0
        while True:
            with self._changed:
                while place == len(self._pieces):
                    if has_ended():
                        return
                    self._changed.wait()
                piece = self._pieces[place]
            place += 1
            yield piece
