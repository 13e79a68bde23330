"""Words for files that are missing or cannot be read: what is wrong with them, and the nearest name that is there."""

import json
from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

LFS_POINTER = b"version https://git-lfs"
GGUF_MAGIC = b"GGUF"
# Least likeness of a name that is told, of 1.
_NEAR = 0.7
# Bytes of a safetensors file before its header, which hold the header's size.
_BEFORE_HEADER = 8


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is nearest to a mistyped one; None if none is near."""
    by_case = {each.lower(): each for each in known}
    found = get_close_matches(name.lower(), by_case, n=1, cutoff=_NEAR)
    return by_case[found[0]] if found else None


def nearest_hint(name: str, known: Iterable[str]) -> str:
    """Return "; the nearest is …", or nothing."""
    near = nearest(name, known)
    return "" if near is None else f"; the nearest is {near}"


def nearest_path_hint(path: Path, what: str = "folder", known: Iterable[str] = ()) -> str:
    """Return the same for a path, of the names that are known and the entries of its folder."""
    hint = nearest_hint(str(path), known)
    if hint or not path.parent.is_dir():
        return hint
    # Parts alone that may be mistyped: a folder or an ending that all share would make any two near.
    around: dict[str, str] = {}
    with suppress(OSError):
        for each in path.parent.iterdir():
            if what == "folder":
                around[each.name] = each.name
            elif each.suffix == path.suffix:
                around[each.stem] = each.name
    near = nearest(path.name if what == "folder" else path.stem, around)
    return "" if near is None else f"; the nearest is {path.parent / around[near]}"


def missing_path(path: Path, what: str = "folder", known: Iterable[str] = ()) -> str:
    """Return that there is no such folder, with the nearest name that there is."""
    if path.is_file():
        return f"{path}: a file, not a folder; give the folder that holds it, {path.parent}"
    return f"{path}: no such {what}{nearest_path_hint(path, what, known)}"


def damage(file: Path, reason: str) -> str:
    """Return why a file of weights cannot be read.

    Args:
        reason: what its reader says, for what is not recognised.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        begin = opened.read(len(LFS_POINTER))
    if begin == LFS_POINTER:
        return "a pointer of Git LFS in place of the weights; run: git lfs pull"
    if size == 0:
        return "an empty file; download it again"
    if file.suffix == ".gguf":
        return f"not a GGUF file that can be read: it begins with {begin[: len(GGUF_MAGIC)]!r} in place of GGUF"
    promised = _promised_size(file) if file.suffix == ".safetensors" else None
    if promised is not None and size < promised:
        return f"cut off: it has {size:,} of the {promised:,} bytes that its header promises; download it again"
    return f"cannot be read: {reason}"


def _promised_size(file: Path) -> int | None:
    """Return the size that a safetensors file has by its header; None where that cannot be told."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_BEFORE_HEADER), "little")
        if size < _BEFORE_HEADER + length:
            # A header longer than this is refused by the library too, and is none.
            return _BEFORE_HEADER + length if length < 100_000_000 else None
        try:
            header = json.loads(opened.read(length))
            ends = [each["data_offsets"][1] for name, each in header.items() if name != "__metadata__"]
            return _BEFORE_HEADER + length + max(ends, default=0)
        except (ValueError, TypeError, LookupError, AttributeError):
            return None
