"""Hypothesis' profiles, how many cases a test draws under each (nightly ten times as many), and cases for the night.

All draw anew, from a seed that the run prints. Cases that failed once may be kept in `tests/failures`.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase, MultiplexedDatabase, ReadOnlyDatabase

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


def by_day(cases: Sequence[Any], few: int, short: int | None = None) -> list[Any]:
    """Return cases for `parametrize`, all but the first `few` marked `nightly`; list first what covers the most.

    Of these few, all but the first `short` are marked `long`; with None, none.
    """
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    marks = [
        [pytest.mark.nightly] if place >= few else [pytest.mark.long] if short is not None and place >= short else []
        for place in range(len(values))
    ]
    return [pytest.param(*own, marks=own_marks) for own, own_marks in zip(values, marks, strict=True)]
