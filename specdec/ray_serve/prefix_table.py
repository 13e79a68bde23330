"""Choice of a replica by the prompt's prefix, bounded by load. Pure Python, without Ray."""

from collections.abc import Mapping, Sequence


class PrefixTable:
    """The prefixes that were sent to each replica, and by them the choice of the next one.

    A replica is assumed to have cached the blocks of its latest prompts. It is not asked: a wrong guess costs the
    computation of a prefix and nothing else.

    Args:
        capacity: blocks remembered per replica; about as many as its cache holds.
        slack: requests by which a replica may be busier than the least busy one.
        factor: times by which it may be busier. Beyond both it is overloaded, and is taken last.
        least_share: share of the prompt's blocks below which a known prefix does not count, so that a beginning that
            all prompts have in common does not draw them to one replica.
    """

    def __init__(self, capacity: int = 65_536, slack: int = 8, factor: float = 1.5, least_share: float = 0.25) -> None:
        for name, value, least in (("capacity", capacity, 1), ("slack", slack, 0), ("factor", factor, 1)):
            if not value >= least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
        if not 0 <= least_share <= 1:
            raise ValueError(f"least_share is {least_share}; it must be between 0 and 1")
        self._capacity, self._slack, self._factor, self._least_share = capacity, slack, factor, least_share
        # Hashes per replica, least recently sent first.
        self._sent: dict[str, dict[bytes, None]] = {}

    def rank(self, blocks: Sequence[bytes], loads: Mapping[str, int]) -> list[str]:
        """Return the replicas in the order in which they are to be tried.

        The first is the one with the longest known prefix among those that are not overloaded. Equal ones are ordered
        by load, then by how many blocks they are known to hold.

        Args:
            blocks: chained hashes of the prompt's full blocks.
            loads: unfinished requests of each replica that takes requests.
        """
        least = min(loads.values(), default=0)

        def order(replica: str) -> tuple[bool, int, int, int, str]:
            load = loads[replica]
            is_overloaded = load > least + self._slack and load > self._factor * least
            known = self.num_known(replica, blocks)
            if known < self._least_share * len(blocks) or is_overloaded:
                known = 0
            return is_overloaded, -known, load, len(self._sent.get(replica, ())), replica

        return sorted(loads, key=order)

    def num_known(self, replica: str, blocks: Sequence[bytes]) -> int:
        """Return how many of a prompt's first blocks were sent to a replica before."""
        sent = self._sent.get(replica, {})
        return next((index for index, block in enumerate(blocks) if block not in sent), len(blocks))

    def note(self, replica: str, blocks: Sequence[bytes]) -> None:
        """Remember that a prompt went to a replica."""
        sent = self._sent.setdefault(replica, {})
        # The beginning of a prompt is forgotten last, as by the engine's own cache.
        for block in reversed(blocks):
            sent.pop(block, None)
            sent[block] = None
        while len(sent) > self._capacity:
            del sent[next(iter(sent))]

    def keep(self, replicas: Sequence[str]) -> None:
        """Forget all replicas but these. A replica that was started anew has another name."""
        self._sent = {name: sent for name, sent in self._sent.items() if name in replicas}
