"""Errors of memory that is not there, of Python, numpy, torch and CUDA, in one line with a remedy."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

REMEDY = "lower kv_cache_memory, max_num_batched_tokens or max_num_seqs, or take a smaller model"
# torch and CUDA have many classes and texts for it.
_SIGNS = ("out of memory", "can't allocate memory")
_SIZE = re.compile(r"allocate ([\d.]+) ?(bytes|[KMGT]i?B)", re.IGNORECASE)


def memory_shortage(error: BaseException) -> str | None:
    """Return "out of memory", with the size that was asked for where the error says it; None for another error."""
    text = str(error)
    is_torchs = isinstance(error, RuntimeError) and any(sign in text.lower() for sign in _SIGNS)
    if not is_torchs and not isinstance(error, MemoryError):
        return None
    found = _SIZE.search(text)
    if found is None:
        return "out of memory"
    size = f"{int(found[1]) / (1 << 30):.3g} GiB" if found[2] == "bytes" else f"{found[1]} {found[2]}"
    return f"out of memory: {size} more cannot be had"


@contextmanager
def explained_shortage(remedy: str = REMEDY) -> Iterator[None]:
    """Turn errors of memory that is not there into a `ValueError` of one line.

    Args:
        remedy: what to do, for the user.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        shortage = memory_shortage(error)
        if shortage is None:
            raise
        raise ValueError(f"{shortage}; {remedy}") from None
