"""The start of a command: what is shown of it, and which packages it waits for."""

import io
import logging
import re
import subprocess
import sys

import pytest
from rich.console import Console

from specdec.cli.startup import spinner

pytestmark = pytest.mark.slow

SLOW = ["torch._dynamo", "sympy", "triton", "transformers.models.auto", "transformers.generation", "matplotlib"]


@pytest.fixture
def log() -> "logging.Logger":
    return logging.getLogger("specdec.of_a_test")


def shown(text: str) -> str:
    """Return text without the codes that colour it and move the cursor."""
    return re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", text)


def test_the_spinner_follows_the_log_and_warnings_stay(log: logging.Logger) -> None:
    root, plain = logging.getLogger("specdec"), io.StringIO()
    handler = logging.StreamHandler(plain)
    handler.setFormatter(logging.Formatter("specdec: %(levelname)s: %(message)s"))
    root.addHandler(handler)
    level, handlers = root.level, list(root.handlers)
    root.setLevel(logging.WARNING)
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=200)
    try:
        with spinner("importing [torch]", console):
            draw = console._live_stack[-1].refresh
            draw()
            log.info("target %s", "[demo]")
            draw()
            log.warning("few positions")
            log.debug("too much")
        assert root.handlers == handlers
        assert root.level == logging.WARNING
        log.warning("behind it")
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    text = shown(terminal.getvalue())
    assert "importing [torch]" in text
    assert "target [demo]" in text
    assert "\rspecdec: WARNING: few positions\n" in text
    assert "too much" not in text
    assert plain.getvalue() == "specdec: WARNING: behind it\n"


@pytest.mark.parametrize(("terminal", "level"), [(False, logging.WARNING), (True, logging.INFO)])
def test_elsewhere_there_is_none(log: logging.Logger, terminal: bool, level: int) -> None:
    root, written = logging.getLogger("specdec"), io.StringIO()
    before = root.level
    root.setLevel(level)
    try:
        with spinner("loading", Console(file=written, force_terminal=terminal)):
            log.info("target")
            assert root.level == level
    finally:
        root.setLevel(before)
    assert written.getvalue() == ""


@pytest.mark.long
def test_the_demo_starts_without_the_packages_that_take_seconds_and_says_what_it_does() -> None:
    """One call on a meta tensor imports torch's compiler, and with it a third of the old start."""
    code = f"""
import sys
from specdec.cli.app import main
try:
    main(["generate", "Hi", "--max-tokens", "2", "-v"])
except SystemExit as exited:
    assert exited.code == 0, exited.code
loaded = [name for name in {SLOW} if name in sys.modules]
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = [
        "loading target",
        "kernels",
        "assumed: the file has no embedding",
        "trees of at most",
        "cache: ",
        "plain step",
    ]
    assert [part for part in told if part not in done.stderr] == []
