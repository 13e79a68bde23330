"""Names for what a full block holds: its tokens and all before them."""

import hashlib
from array import array
from collections.abc import Sequence


def extend_hashes(hashes: list[bytes], token_ids: Sequence[int], block_size: int, salt: str | None) -> None:
    """Append the hashes of the full blocks of `token_ids` that `hashes` lacks.

    Each is the SHA-256 of the hash before it and the block's tokens, so that equal hashes mean equal tokens from the
    beginning on; the first follows the salt's, so that requests of different salts share nothing.
    """
    parent = (
        hashes[-1]
        if hashes
        else hashlib.sha256(b"" if salt is None else b"salt " + salt.encode(errors="surrogatepass")).digest()
    )
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        tokens = array("q", token_ids[start : start + block_size])
        parent = hashlib.sha256(parent + tokens.tobytes()).digest()
        hashes.append(parent)
