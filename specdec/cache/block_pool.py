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

    def register(self, block: int, block_hash: bytes) -> None:
        """Publish a held block that is full and written. If the hash is taken, the older block keeps it."""
        if self._hashes[block] is None and block_hash not in self._by_hash:
            self._hashes[block] = block_hash
            self._by_hash[block_hash] = block

    def find(self, block_hash: bytes) -> int | None:
        """Return the block registered with the hash."""
        return self._by_hash.get(block_hash)

    def hash_of(self, block: int) -> bytes | None:
        """Return the hash that the block is registered with."""
        return self._hashes[block]

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

    def check_integrity(self, holders: Iterable[Iterable[int]] | None = None) -> None:
        """Assert that the pool is what follows from its reference counts and hashes.

        Args:
            holders: all block tables, whose sum the counts must be.
        """
        listed: list[int] = []
        block, before = self._next[self.num_blocks], self.num_blocks
        while block != self.num_blocks:
            assert len(listed) < self.num_blocks, "the free list does not end"
            assert self._previous[block] == before, f"block {block} is linked one way only"
            listed.append(block)
            before, block = block, self._next[block]
        assert self._previous[self.num_blocks] == before, "the free list's end is linked one way only"
        assert len(set(listed)) == len(listed) == self.num_free, "the free list is not what num_free says"
        unheld = {block for block in range(self.num_blocks) if self._refs[block] == 0}
        assert set(listed) == unheld, f"free and held, or neither: {sorted(set(listed) ^ unheld)}"
        hashed = [self._hashes[block] is not None for block in listed]
        assert hashed == sorted(hashed), "a block that can be found is reused before one that cannot"
        found = {block_hash: block for block, block_hash in enumerate(self._hashes) if block_hash is not None}
        named = sum(block_hash is not None for block_hash in self._hashes)
        assert len(found) == named, "the hash map is not what the blocks say"
        assert found == self._by_hash, "the hash map is not what the blocks say"
        if holders is not None:
            counts = [0] * self.num_blocks
            for table in holders:
                for block in table:
                    counts[block] += 1
            assert counts == self._refs, "reference counts are not those of the block tables"
