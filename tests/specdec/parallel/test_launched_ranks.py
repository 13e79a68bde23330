"""Ranks that torchrun has started."""

import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from specdec import LLM, SamplingParams
from specdec.core.launch import Launch, current_launch
from specdec.parallel import other_ranks
from specdec.parallel import started_ranks as module
from specdec.parallel.other_ranks import OtherRanks
from specdec.parallel.rank_group import Store, file_store
from specdec.parallel.ranks import RankDeadError
from specdec.parallel.started_ranks import launched_ranks, met_rank
from tests.specdec.world import World

pytestmark = pytest.mark.slow

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}


@pytest.mark.long
def test_the_program_under_torchrun(world: World) -> None:
    """Rank 0 runs the command, and the other one is a pipeline stage, whatever the command says."""
    asked = ["--draft", str(world.folder / "head3"), "--dtype", "float64", "--fixed-drafts", "--temperature", "0"]
    command = ["-m", "specdec", "generate", "abcd", "--model", str(world.folder / "target"), *asked]
    limits = ["--max-tokens", "20", "--ignore-eos", "--pipeline-parallel-size", "2", "--prefill-stretch", "0"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run([*launcher, *command, *limits], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    with LLM(world.folder / "target", None, dtype="float64", prefill_stretch=0, adaptive_drafts=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        (output,) = llm.generate("abcd", params, use_tqdm=False)
    # Figures follow the text.
    assert ran.stdout.splitlines()[0].strip() == output.outputs[0].text.strip()
    assert len(output.outputs[0].token_ids) == 20


def test_a_launchers_variables_are_read() -> None:
    assert current_launch({}) is None
    assert current_launch({**TORCHRUN, "WORLD_SIZE": "1"}) is None
    launch = current_launch({**TORCHRUN, "MASTER_ADDR": "node-0"})
    assert launch == Launch(rank=3, size=4, local_rank=1, local_size=2, address="node-0")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"RANK": "4"}, "the environment variable RANK is '4'; it must be between 0 and 3"),
        ({"WORLD_SIZE": "many"}, "the environment variable WORLD_SIZE is 'many'; it must be at least 1"),
        ({}, "WORLD_SIZE is 4 and MASTER_ADDR is not set; start the ranks with torchrun"),
    ],
)
def test_an_environment_that_does_not_fit_together(more: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        current_launch({**TORCHRUN, **more})


@pytest.mark.parametrize(
    ("rank", "message"),
    [("0", r"has started 4 ranks \(WORLD_SIZE\), and .* is 1; make them equal"), ("1", "is rank 1 of 4; only rank 0")],
)
def test_engines_that_a_launcher_has_no_ranks_for(
    world: World, rank: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        LLM(world.folder / "target", None)


def test_ranks_meet_in_any_order_and_strangers_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger is a process that found the port and does not know the key."""
    launches = [Launch(rank, 3, rank, 3, "localhost") for rank in range(3)]

    def store(_: Launch) -> Store:
        return file_store(str(tmp_path / "store"))

    monkeypatch.setattr(module, "_store", store)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(launched_ranks, launches[0], 30)
        port = int(store(launches[0]).get("specdec-engine").split()[0])
        with socket.create_connection(("localhost", port)) as stranger:
            stranger.sendall(b"\0\0\0\3abc")
        others = [threads.submit(met_rank, launches[rank]).result() for rank in (2, 1)]
        ranks = first.result()
    assert len(ranks.connections) == 2
    for connection, other in zip(ranks.connections, reversed(others), strict=True):
        connection.send("greetings")
        assert other.receive() == "greetings"
    with pytest.raises(ValueError, match="the ranks of a launcher serve one engine only"):
        launched_ranks(launches[0], 30)
    ranks.close()


def test_a_rank_that_ends_before_it_comes_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_ranks, "_LOOK", 0.01)
    killed, is_closed = list[int](), threading.Event()
    processes = [
        SimpleNamespace(poll=lambda code=code: code, kill=lambda rank=rank: killed.append(rank))
        for rank, code in ((1, None), (2, 3))
    ]
    with pytest.raises(RankDeadError, match=r"^rank 2 of 3 has ended with exit code 3 before it was there$"):
        OtherRanks(file_store(str(tmp_path / "store")), processes, 30, is_closed.set)
    assert killed == [1, 2]
    assert is_closed.is_set()
