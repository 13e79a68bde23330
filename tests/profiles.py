"""Hypothesis' profiles, and how many cases a test draws under each: nightly ten times as many.

All draw anew, from a seed that the run prints. Cases that failed once may be kept in `tests/failures`.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase, MultiplexedDatabase, ReadOnlyDatabase

T = TypeVar("T")
# Cases of a test that says nothing else.
USUAL = 25
PROFILES = {"dev": USUAL, "nightly": 10 * USUAL}
_name = os.environ.get("HYPOTHESIS_PROFILE") or "dev"
IS_NIGHTLY = _name == "nightly"
_ROOT = Path(__file__).parents[1]
_DATABASE = MultiplexedDatabase(
    DirectoryBasedExampleDatabase(_ROOT / ".hypothesis" / "examples"),
    ReadOnlyDatabase(DirectoryBasedExampleDatabase(_ROOT / "tests" / "failures")),
)

for name, count in PROFILES.items():
    settings.register_profile(
        name,
        database=_DATABASE,
        deadline=None,
        max_examples=count,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
settings.load_profile(_name)


def num_cases(count: int) -> int:
    """Return how many cases a test draws that usually draws `count`."""
    return count * PROFILES[_name] // USUAL


def by_day(cases: Sequence[T], few: int) -> Sequence[T]:
    """Return all cases by night and the first `few` by day; list those first that cover the most."""
    return cases if IS_NIGHTLY else cases[:few]
