"""A place where processes of one machine wait for each other, by the compiled library."""

from collections.abc import Sequence
from ctypes import c_int, c_int64, c_uint64, c_void_p

from specdec.kernels.native.library import address_of, numbers, opened_calls


class Barrier:
    """A barrier of processes, or threads, by counters in memory that they share.

    Args:
        own: address of this one's counter, 8 bytes that are 0 at first and lie alone in their 64.
        others: addresses of all other counters.

    Raises:
        ValueError: the library is not built, or from other sources.
    """

    def __init__(self, own: int, others: Sequence[int]) -> None:
        signature = c_int, [c_void_p, c_void_p, c_int64, c_uint64, c_int64]
        self._call = opened_calls("specdec_barrier", {"wait": signature})["wait"]
        self._others = numbers(others)
        self._given = own, address_of(self._others), len(others)

    def wait(self, number: int, seconds: float) -> bool:
        """Come to the barrier and wait for the others; return whether they come within `seconds`.

        Args:
            number: how often this one has come, with this time; the same again to wait longer.
        """
        return bool(self._call(*self._given, number, int(1e9 * seconds)))
