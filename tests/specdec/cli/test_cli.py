"""The command line: environment, help, log, and Ctrl-C at any moment."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from specdec.cli.app import main
from tests.command_line import Run
from tests.specdec.tiny_checkpoints import Tiny

pytestmark = pytest.mark.slow


def test_environment_names_the_checkpoints(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_MODEL", str(tiny.target))
    monkeypatch.setenv("SPECDEC_DRAFT", str(tiny.head))
    with pytest.raises(SystemExit) as exited:
        main(["generate", "Hello", "--max-tokens", "3", "--json"])
    assert exited.value.code == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "Hello"


@pytest.mark.long
def test_help_and_mistakes_do_not_wait_for_torch() -> None:
    code = """
import sys
from specdec.cli.app import main
for args, expected in ((["generate", "--help"], 0), (["--version"], 0), (["generate", "x", "--top-p", "2"], 2)):
    try:
        main(args)
    except SystemExit as exited:
        assert exited.code == expected, exited.code
    assert "torch" not in sys.modules, args
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_verbose_tells_what_is_loaded(run: Run, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    told = run("Hello", "--verbose", "--json")
    for pattern in (
        rf"target {re.escape(str(tiny.target))}: [\d,]+ parameters, float64 on cpu, torch kernels, loaded in [\d.]+ s",
        rf"{re.escape(str(tiny.head))}: EAGLE-1/2 in the layout of official EAGLE$",
        r"measuring step costs$",
        rf"drafts: {re.escape(str(tiny.head))}, trees of at most \d+ nodes, depth 2, branching \d+",
        r"cache: \d+ tokens in \d+ blocks of 16, [\d.]+ MiB",
        r"step costs measured in [\d.]+ s: plain step [\d.]+ ms",
        r"ready after [\d.]+ s",
    ):
        assert re.search(rf"^specdec: INFO: {pattern}", told.err, re.MULTILINE), pattern
    assert run("Hello", "--json").err == ""
    monkeypatch.setenv("SPECDEC_LOG_LEVEL", "info")
    assert "specdec: INFO: ready after" in run("Hello", "--json").err
    monkeypatch.setenv("SPECDEC_LOG_LEVEL", "loud")
    assert run("Hello").err == (
        "specdec: SPECDEC_LOG_LEVEL is 'LOUD'; it must be one of debug, info, warning, error, critical\n"
    )


@pytest.fixture
def heeded_sigint() -> Iterator[None]:
    """Python's own handler of SIGINT: a shell starts background jobs with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded_sigint")
@pytest.mark.parametrize("error", [KeyboardInterrupt, ImportError, ValueError])
def test_ctrl_c_exits_with_130_whatever_becomes_of_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """A library may turn the interrupt into an error of its own, as imports of extension modules do."""

    def read(*_: object, **__: object) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise error("the tokenizer cannot be read") from None

    monkeypatch.setattr("specdec.cli.generate.read_prompts", read)
    assert run("hi") == (130, "", "")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_while_the_command_line_is_imported() -> None:
    code = """
import builtins, sys
real = builtins.__import__
def imports(name, *args, **kwargs):
    if name == "typer":
        raise KeyboardInterrupt
    return real(name, *args, **kwargs)
builtins.__import__ = imports
from specdec.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.long
def test_module_runs_as_the_console_script_does() -> None:
    done = subprocess.run([sys.executable, "-m", "specdec", "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"specdec \d+\.\d+\.\d+\n", done.stdout)
