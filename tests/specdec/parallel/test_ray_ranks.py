"""Ranks in Ray actors: on a double of Ray whose actors are threads, and on Ray where it is installed."""

import sys
import threading
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import pytest

from specdec import LLM, SamplingParams
from specdec.parallel.ranks import RankDeadError
from tests.specdec.world import World

PARAMS = [SamplingParams(temperature=float(i), seed=i, max_tokens=12, ignore_eos=True) for i in range(2)]
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14]]


class Call:
    """A method of an actor, which runs in a thread."""

    def __init__(self, method: Any) -> None:
        self.method = method

    def remote(self, *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=self.method, args=arguments, daemon=True)
        thread.start()
        return thread


class Ray(SimpleNamespace):
    """The part of Ray that ranks use, by its documentation."""

    def __init__(self) -> None:
        util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
        super().__init__(needs=[], killed=[], util=util, __spec__=ModuleSpec("ray", None))

    def is_initialized(self) -> bool:
        return True

    def remote(self, **needs: int) -> Any:
        self.needs.append(needs)

        def made(kind: type) -> SimpleNamespace:
            return SimpleNamespace(remote=lambda: SimpleNamespace(follow=Call(kind().follow)))

        return made

    def wait(self, runs: list[threading.Thread], timeout: float | None) -> tuple[list[Any], list[Any]]:
        runs[0].join(timeout)
        return ([], runs) if runs[0].is_alive() else (runs, [])

    def kill(self, actor: object) -> None:
        self.killed.append(actor)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Ray:
    ray = Ray()
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


def load(world: World, **settings: Any) -> LLM:
    return LLM(world.folder / "target", world.draft("eagle3"), dtype="float64", adaptive_drafts=False, **settings)


def texts(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.mark.long
@pytest.mark.parametrize("split", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_tokens_are_those_of_one_rank(world: World, double: Ray, split: str) -> None:
    with load(world) as one, load(world, distributed_executor_backend="ray", **{split: 2}) as llm:
        assert texts(llm) == texts(one)
    assert double.needs == [{"num_cpus": 1}]
    assert len(double.killed) >= 1


def test_a_missing_package_is_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match="needs ray; run: pip install"):
        load(world, distributed_executor_backend="ray", tensor_parallel_size=2)


def test_ray_itself(world: World) -> None:
    ray = pytest.importorskip("ray", reason="the package ray is not installed: pip install 'specdec[ray]'")
    with load(world) as one, load(world, distributed_executor_backend="ray", tensor_parallel_size=2) as llm:
        assert texts(llm) == texts(one)
        (process,) = llm.engine.ranks._processes
        ray.kill(process._actor)
        with pytest.raises(RankDeadError, match="rank 1 of 2 has ended"):
            texts(llm)
    ray.shutdown()
