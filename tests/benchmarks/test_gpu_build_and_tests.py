"""What the first stage on a GPU runs, and what it calls a failure."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import build_and_tests
from benchmarks.gpu.stage import Stage


def outcome(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    statuses: dict[str, int | None],
    installed: bool = True,
    said: str = "",
) -> tuple[Stage, list[str]]:
    """Run the stage with programs that do nothing but fail with a first line; return it and the commands."""
    commands = []

    def run_program(_: Stage, command: list[str], *rest: Any, **__: str) -> tuple[int | None, list[str]]:
        commands.append(" ".join([*rest[1], *command]))
        status = next((status for word, status in statuses.items() if word in commands[-1]), 0)
        return status, [said if status else "", "5 passed in 2.00s", *["behind it"] * 19]

    monkeypatch.setattr(Stage, "run_program", run_program)
    monkeypatch.setattr(build_and_tests.shutil, "which", lambda _: "there" if installed else None)
    stage = Stage("build-and-tests", torch.device("cuda"), tmp_path, time.monotonic() + 60)
    build_and_tests.run(stage)
    return stage, commands


def results(stage: Stage) -> dict[str, Any]:
    return {name: part["result"] for name, part in stage.figures["parts"].items()}


def test_all_kernel_tests_run_and_both_checkers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, commands = outcome(tmp_path, monkeypatch, {})
    build, tests, memcheck, racecheck = commands
    assert stage.failures == []
    assert build == "setup.py build_ext --inplace"
    assert tests.endswith("tests/kernels -m not nightly -n 8")
    assert memcheck.startswith("compute-sanitizer ")
    assert memcheck.endswith("--tool memcheck -m benchmarks.gpu.short_engine")
    assert racecheck.endswith("--tool racecheck -m benchmarks.gpu.one_kernel " + " ".join(build_and_tests.RACED))
    assert stage.table is not None
    assert [*stage.table.columns[3].cells][1] == "5 passed in 2.00s"


def test_failed_and_stopped_parts_are_failures_and_a_library_that_is_not_built_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, _ = outcome(tmp_path, monkeypatch, {"build_ext": 1, "pytest": None, "racecheck": 99})
    assert results(stage) == {
        "build": "exit status 1",
        "tests": "stopped",
        "memcheck": "passed",
        "racecheck": "exit status 99",
    }
    assert stage.failures == ["tests: stopped", "racecheck: exit status 99"]


def test_without_the_checker_its_parts_fail_and_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, commands = outcome(tmp_path, monkeypatch, {}, installed=False)
    assert len(commands) == 2
    assert stage.failures == ["memcheck: not run", "racecheck: not run"]
    assert "compute-sanitizer is not installed" in stage.figures["parts"]["memcheck"]["end"][0]


def test_parts_of_a_checker_that_does_not_support_the_device_are_no_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses: dict[str, int | None] = {"memcheck": 1, "pytest": 1}
    stage, _ = outcome(tmp_path, monkeypatch, statuses, said="========= Error: Device not supported.")
    assert results(stage)["memcheck"] == "not run"
    assert stage.failures == ["tests: exit status 1"]
