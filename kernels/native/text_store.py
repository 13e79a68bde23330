"""A bounded store of texts, searched by their last tokens, by the compiled library."""

from array import array
from collections.abc import Sequence
from ctypes import c_int64, c_uint64, c_void_p

from specdec.kernels.native.library import Signatures, address_of, opened_calls, room
from specdec.kernels.types.text_store import LONGEST, MOST_FOUND, FoundText, Space, num_pages

_CALLS: Signatures = {
    "open": (c_void_p, [c_int64]),
    "close": (None, [c_void_p]),
    "bytes": (c_int64, [c_void_p]),
    "append": (c_int64, [c_void_p, c_int64, c_uint64, c_uint64, c_int64, c_void_p, c_int64, c_int64]),
    "find": (c_int64, [c_void_p, c_int64, c_uint64, c_uint64, c_void_p, c_int64, c_int64, c_int64, c_void_p]),
    "touch": (None, [c_void_p, c_int64]),
}


class NativeTextStore:
    """See `TextStore`.

    Args:
        tokens: that it holds, in whole pages.

    Attributes:
        num_bytes: memory that it takes once it is full.

    Raises:
        ValueError: the library is not built, or from other sources.
        MemoryError: there is no memory for it.
    """

    def __init__(self, tokens: int) -> None:
        calls = opened_calls("specdec_store", _CALLS)
        self._append, self._find, self._touch, self._close = (
            calls[name] for name in ("append", "find", "touch", "close")
        )
        self._store = calls["open"](num_pages(tokens))
        if not self._store:
            raise MemoryError(f"no memory for a store of {tokens} tokens; lower draft_store_tokens")
        self.num_bytes: int = calls["bytes"](self._store)
        # What a search writes, kept for the next one.
        self._found = room(0)

    def __del__(self) -> None:
        if getattr(self, "_store", None):
            self._close(self._store)
            self._store = None

    def append(self, text: int, space: Space, page: int, tokens: Sequence[int], context: int) -> int:
        """See `TextStore.append`."""
        given = array("i", tokens)
        count = len(given) - context
        return self._append(self._store, text, *space, page, address_of(given), context, count)  # type: ignore[no-any-return]

    def find(self, text: int, space: Space, last: Sequence[int], most: int, depth: int) -> list[FoundText]:
        """See `TextStore.find`."""
        given, most, size = array("i", last[-LONGEST:]), min(most, MOST_FOUND), 3 + depth
        if len(self._found) < most * size:
            self._found = room(most * size)
        out = self._found
        count = self._find(self._store, text, *space, address_of(given), len(given), most, depth, address_of(out))
        return [
            FoundText(out[row], out[row + 1], out[row + 3 : row + 3 + out[row + 2]].tolist())
            for row in range(0, count * size, size)
        ]

    def touch(self, place: int) -> None:
        """See `TextStore.touch`."""
        self._touch(self._store, place)
