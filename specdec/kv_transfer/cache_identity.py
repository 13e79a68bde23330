"""Names under which stores keep blocks: what must be equal for a block to be of use."""

import hashlib
import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)
FORMAT = 1
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
# The hub's cache names a file's content by its hash.
_HUB_BLOB = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
TARGET_PARTS = ("target",)


class BlockKeys:
    """Keys of blocks, in vLLM's form of its Mooncake store.

    Args:
        target: identity of the target and of the cache's layout.
        head: identity of the head, which enters the keys of its parts alone; None without one.
        prefix: separates deployments that share a store.
        place: of the process whose part of the blocks this is. It names the numbers of ranks too, since ranks of
            engines of different sizes hold different heads or layers in blocks of one shape.
    """

    def __init__(self, target: str, head: str | None, prefix: str, place: str) -> None:
        start = f"{prefix}@" if prefix else ""
        self._target = f"{start}{target}@{place}@group:target@"
        self._head = f"{start}{target}@{place}@head:{head}@group:"

    def __call__(self, part: str, block_hash: bytes) -> str:
        """Return the key of a part ("target", "features", "head") of a block."""
        if part in TARGET_PARTS:
            return self._target + block_hash.hex()
        return f"{self._head}{part}@{block_hash.hex()}"


def identity(facts: Mapping[str, Any]) -> str:
    """Return 32 hexadecimal digits that stand for these facts."""
    return hashlib.sha256(json.dumps([FORMAT, facts], sort_keys=True, default=str).encode()).hexdigest()[:32]


def checkpoint_identity(path: Path) -> list[tuple[str, str]]:
    """Return name and SHA-256 of the configuration and of each file of weights, whatever folder they lie in.

    Files are read once, about a gigabyte a second; those of the hub's cache are named by their hash already.
    """
    began = time.perf_counter()
    if path.is_file():
        return [("model", content_identity(path))]
    files = [file for file in path.iterdir() if file.suffix in _WEIGHTS or file.name == "config.json"]
    found = [(file.name, content_identity(file)) for file in sorted(files)]
    logger.info("identity of %s: %d files in %.1f s", path, len(found), time.perf_counter() - began)
    return found


def content_identity(file: Path) -> str:
    """Return the SHA-256 of a file's content; the hub's cache has named its files by one."""
    real = file.resolve()
    if real.parent.name == "blobs" and _HUB_BLOB.fullmatch(real.name):
        return real.name
    with real.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def shape_of(parts: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
    """Return shape and dtype of a block of these parts of the cache."""
    return [(name, list(parts[name].shape[1:]), str(parts[name].dtype)) for name in names if name in parts]
