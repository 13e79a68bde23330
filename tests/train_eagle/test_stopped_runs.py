"""Runs that a signal ends go on to the same weights; their threads sleep while they wait."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specdec.train_eagle.training.train_run import TrainingRun
from tests.profiles import by_day
from tests.training_runs import command, config, environment, last, main, save_own_words, save_target

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_own_words(tmp_path_factory.mktemp("data"), target)


# Says each step before it is taken, and takes it once a line, or the end of input, has come.
STEPPING = """
import sys
from specdec.train_eagle.program import main
from specdec.train_eagle.training.train_run import TrainingRun
real = TrainingRun.step
def step(run, number):
    print("step", number, flush=True)
    sys.stdin.readline()
    return real(run, number)
TrainingRun.step = step
main(["train", *sys.argv[1:]])
"""


def ended_at(step: int, number: int, words: list[str]) -> tuple[int, str]:
    """Send a signal to a run in the middle of a step; return its exit code and what it printed afterwards."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    run = subprocess.Popen([sys.executable, "-c", STEPPING, *words], env=environment(), **pipes)
    assert run.stdin is not None
    assert run.stdout is not None
    for line in run.stdout:
        if line == f"step {step}\n":
            run.send_signal(number)
            break
        if line.startswith("step "):
            run.stdin.write("\n")
            run.stdin.flush()
    told = run.communicate()[0]
    return run.returncode, told


@pytest.mark.long
@pytest.mark.parametrize("number", by_day([signal.SIGTERM, signal.SIGKILL, signal.SIGINT], 1))
def test_a_run_ended_by_a_signal_goes_on_to_the_same_weights(
    number: signal.Signals, target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the middle of a drawn step: after kill -9 from the last checkpoint, else from that step's end.

    States of the target are kept, so that later epochs read what the first one computed.
    """
    kills = number == signal.SIGKILL
    optimizer = random.choice(["adamw", "muon"])
    settings = ("--epochs", "4", "--checkpoint-minutes", "1e-9" if kills else "1000", "--optimizer", optimizer)
    main(command(target, data, tmp_path / "whole", *settings, "--features", str(tmp_path / "features")))
    whole = last(tmp_path / "whole")
    step = random.randrange(1, whole.step - 1)
    words = command(target, data, tmp_path / "cut", *settings, "--features", str(tmp_path / "features of cut"))
    code, told = ended_at(step, number, words)
    cut_at = last(tmp_path / "cut").step
    assert code == (-number if kills else 128 + number), told
    assert cut_at == step + (not kills)
    assert kills or f"stopped   after step {cut_at} of {whole.step}, saved in " in told
    capsys.readouterr()
    main(words)
    assert f"resumes   after step {cut_at} of " in capsys.readouterr().out
    cut = last(tmp_path / "cut")
    assert (whole.step, whole.best_tau) == (cut.step, cut.best_tau)
    for name, tensor in whole.head().items():
        assert torch.equal(tensor, cut.head()[name]), name
    # The records of steps that were taken again are there once.
    steps = [json.loads(line)["step"] for line in (tmp_path / "cut" / "run" / "log.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    saved = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut")]
    assert all(torch.equal(tensor, saved[1][name]) for name, tensor in saved[0].items())


@pytest.mark.long
def test_a_second_ctrl_c_ends_a_run_at_once(target: Path, data: Path, tmp_path: Path) -> None:
    """And leaves the last checkpoint; SIGTERM as often as it likes waits for the step's end."""
    run = TrainingRun(config(target, data, tmp_path))
    real, taken = TrainingRun.step, []

    def step(number: int) -> Any:
        taken.append(number)
        for _ in range(2):
            os.kill(os.getpid(), signals[0])
        return real(run, number)

    run.step = step  # type: ignore[method-assign]
    for signals in ([signal.SIGTERM], [signal.SIGINT]):
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        if signals[0] == signal.SIGTERM:
            assert run.train() == signal.SIGTERM
        else:
            with pytest.raises(KeyboardInterrupt):
                run.train()
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
        assert last(tmp_path).step == 1
    assert taken == [0, 1]


@pytest.mark.long
@pytest.mark.parametrize(("given", "sleeps"), [({}, True), ({"OMP_WAIT_POLICY": "ACTIVE"}, False)])
def test_threads_sleep_while_they_wait(tmp_path: Path, given: dict[str, str], sleeps: bool) -> None:
    """As OpenMP itself tells when torch loads it; what the user sets stays."""
    words = [sys.executable, "-m", "specdec", "train", "--data", tmp_path / "none", "--out", tmp_path / "out"]
    own = {name: value for name, value in environment().items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        words, env={**own, "OMP_DISPLAY_ENV": "VERBOSE", **given}, capture_output=True, text=True, check=False
    )
    assert "no prepared data" in done.stderr
    # Turns of a waiting thread before it sleeps.
    spins = re.search(r"GOMP_SPINCOUNT = '(\d+|INFINITE|INFINITY)'", done.stderr, re.IGNORECASE)
    if spins is None:
        pytest.skip("torch stands on another OpenMP than GNU's here")
    assert (spins[1] == "0") == sleeps


@pytest.mark.long
def test_threads_are_those_asked_for(target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    TrainingRun(config(target, data, tmp_path, epochs=1, threads=3)).train()
    assert asked == [3]
    # Another machine may have other cores.
    TrainingRun(config(target, data, tmp_path, epochs=1, threads=2))
    assert asked == [3, 2]
