"""`benchmarks.serving` beside vLLM's server, for which a program of its name stands in."""

import argparse
import sys
from pathlib import Path

import pytest

from benchmarks import serving
from specdec import LLM, SamplingParams
from tests.specdec.saved_llama import save_llama

pytestmark = pytest.mark.slow

ARGS = {"clients": 2, "threads": 1, "draft": "eagle", "before": None}


@pytest.mark.long
def test_a_vllm_that_is_installed_is_measured_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_llama(tmp_path / "target")
    program = tmp_path / "vllm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m specdec "$@" --draft none\n')
    program.chmod(0o755)
    args = argparse.Namespace(**ARGS, model=tmp_path / "target", max_tokens=5)
    monkeypatch.setenv("PATH", "")
    assert list(serving.server_commands(args)) == ["plain", "eagle"]
    monkeypatch.setenv("PATH", str(tmp_path))
    command = serving.server_commands(args)["vllm"]
    prompts = [[3, 4, 5], [6, 7], [8]]
    expected = LLM(args.model, draft=None).generate(
        prompts, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    )
    with serving.server(command) as port:
        for stream in (False, True):
            run = serving.through_server(port, "model", prompts, args, stream)
            assert [answer.token_ids for answer in run.answers] == [output.token_ids for output in expected]
            assert all((answer.first is not None) == stream for answer in run.answers)


@pytest.mark.long
def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "specdec", "serve", str(tmp_path / "none")]
    with pytest.raises(RuntimeError, match=r"the server did not start: .*none"), serving.server(command):
        pass
