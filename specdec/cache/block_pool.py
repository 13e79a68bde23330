"""Reference counts and hashes of the paged cache's blocks. Pure Python: ids only, no tensors."""

import hashlib
from array import array
from collections.abc import Iterable, Sequence


def extend_hashes(hashes: list[bytes], token_ids: Sequence[int], block_size: int, salt: str | None) -> None:
    """Append the hashes of the full blocks of `token_ids` that `hashes` lacks.

    Each is the SHA-256 of the previous hash and the block's tokens, so that equal hashes mean equal tokens from the
    beginning on. The first one follows the hash of the salt, so that requests of different salts share nothing.
    """
    prefix = b"" if salt is None else b"salt " + salt.encode(errors="surrogatepass")
    parent = hashes[-1] if hashes else hashlib.sha256(prefix).digest()
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        tokens = array("q", token_ids[start : start + block_size])
        parent = hashlib.sha256(parent + tokens.tobytes()).digest()
        hashes.append(parent)


NONE = -1


class BlockPool:
    """A fixed number of blocks with reference counts, which can be found by the hash of their content.

    A block without a holder is free. Free blocks without a hash are reused first, then the least recently used. A free
    block with a hash can be found and shared until it is reused. All operations take constant time per block, as free
    blocks form a doubly linked list.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._refs = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._read = bytearray(num_blocks)
        # A ring through all free blocks. Its head has the last index and is no block.
        self._next = [*range(1, num_blocks + 1), 0]
        self._previous = [num_blocks, *range(num_blocks)]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks and forget their content. The caller has checked `num_free`."""
        assert count <= self.num_free, f"{count} blocks asked, {self.num_free} free"
        blocks = []
        for _ in range(count):
            block = self._next[self.num_blocks]
            self._unlink(block)
            self._refs[block] = 1
            self._read[block] = False
            old = self._hashes[block]
            if old is not None:
                del self._by_hash[old]
                self._hashes[block] = None
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a holder to each block, free ones included."""
        for block in blocks:
            if self._refs[block] == 0:
                self._unlink(block)
            self._refs[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Remove a holder from each block. Those that become free are reused in the order given."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} is free already"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._link(block)

    def register(self, block: int, block_hash: bytes) -> bool:
        """Publish a held block that is full and written; False if it is published, or an older block has the hash."""
        if self._hashes[block] is not None or block_hash in self._by_hash:
            return False
        self._hashes[block] = block_hash
        self._by_hash[block_hash] = block
        return True

    def withdraw(self, block: int) -> None:
        """Remove a held block from the prefix cache; it stays held."""
        assert self._refs[block] > 0, f"block {block} is free"
        old, self._hashes[block] = self._hashes[block], None
        if old is not None:
            del self._by_hash[old]

    def find(self, block_hash: bytes) -> int | None:
        """Return the block registered with the hash."""
        return self._by_hash.get(block_hash)

    def is_free(self, block: int) -> bool:
        return self._refs[block] == 0

    def is_private(self, block: int) -> bool:
        """Return whether the block's holder may write to it: it is the only one, and the block cannot be found."""
        return self._refs[block] == 1 and self._hashes[block] is None

    def mark_read(self, block: int) -> None:
        """Note that the draft head's keys and values of all entries of the block are written."""
        self._read[block] = True

    def is_read(self, block: int) -> bool:
        return bool(self._read[block])

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self._next[block] = self._previous[block] = NONE
        self.num_free -= 1

    def _link(self, block: int) -> None:
        """Insert a block at the end of the free list, or at its start if it has no hash."""
        head = self.num_blocks
        if self._hashes[block] is None:
            before, after = head, self._next[head]
        else:
            before, after = self._previous[head], head
        self._next[before] = self._previous[after] = block
        self._previous[block], self._next[block] = before, after
        self.num_free += 1
