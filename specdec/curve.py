"""A rising curve through measured points. Pure Python."""

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate


class Curve:
    """Straight lines between the points, and their first and last line onwards; never falls, never below 0.

    Args:
        points: `(x, y)`, at least one, x ascending; where a y is below one before it, that one counts.

    Raises:
        ValueError: no point, or x does not ascend.
    """

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        pairs = list(points)
        self.xs = [float(x) for x, _ in pairs]
        self.ys = list(accumulate((float(y) for _, y in pairs), max))
        if not pairs or any(a >= b for a, b in zip(self.xs, self.xs[1:], strict=False)):
            raise ValueError(f"a curve needs points with ascending x; got {self.xs}")

    def __call__(self, x: float) -> float:
        xs, ys = self.xs, self.ys
        if len(xs) == 1:
            return ys[0]
        i = min(max(bisect_right(xs, x), 1), len(xs) - 1)
        return max(0.0, ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1]))

    def inverse(self, y: float) -> float:
        """The x that costs `y`; the first point's where the curve starts flat there, infinite where it ends flat."""
        xs, ys = self.xs, self.ys
        if len(xs) == 1:
            return xs[0] if y < ys[0] else float("inf")
        i = min(max(bisect_right(ys, y), 1), len(ys) - 1)
        rise = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
        if rise == 0:
            return xs[0] if y < ys[i] else float("inf")
        return xs[i - 1] + (y - ys[i - 1]) / rise
