"""Costs at the start of an engine, measured as briefly as can be: tests need no good ones."""

import pytest


def measure_briefly(patch: pytest.MonkeyPatch) -> None:
    """Measure each part of a step once."""
    for name, value in {"ROUNDS": 1, "LEAST_SECONDS": 0.0, "IN_A_ROW": 1}.items():
        patch.setattr(f"specdec.execution.cost_measurement.{name}", value)
