"""Which conversations make up which batch."""

import random
from collections.abc import Sequence


def packed(lengths: Sequence[int], batch_tokens: int, seed: int) -> list[list[int]]:
    """One epoch: every conversation once, in an order that follows from the seed, about `batch_tokens` a batch.

    A conversation is put into the first open batch that has room for it, so little of a batch stays empty.

    Raises:
        ValueError: a conversation is longer than a batch.
    """
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    full: list[list[int]] = []
    # Few are open at a time, or the last would all be short ones.
    open_: list[tuple[int, list[int]]] = []
    for i in order:
        length = lengths[i]
        if length > batch_tokens:
            raise ValueError(f"a conversation has {length} tokens, more than batch_tokens = {batch_tokens}")
        for place, (room, batch) in enumerate(open_):
            if length <= room:
                batch.append(i)
                open_[place] = (room - length, batch)
                break
        else:
            open_.append((batch_tokens - length, [i]))
            if len(open_) > 4:
                open_.sort(key=lambda entry: entry[0])
                full.append(open_.pop(0)[1])
    return full + [batch for _, batch in open_]
