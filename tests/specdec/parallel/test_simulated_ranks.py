"""Ranks on two simulated GPUs, each in its own process: tokens, waits, and what graphs hold."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from specdec import LLM, DraftShape, SamplingParams
from specdec.execution.stage_exchange import StageExchange
from specdec.parallel.first_rank import COLLECTIVE_TIMEOUT
from specdec.parallel.rank_group import CONNECT_TIMEOUT
from tests.fakes import save_random_eagle3, save_random_llama
from tests.specdec.parallel.simulated_rank import SIZE, SimulatedNCCL, simulated_rank

pytestmark = pytest.mark.slow

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [20, 21, 22]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=4, ignore_eos=True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("simulated ranks")
    save_random_llama(folder / "target", head_dim=16)
    save_random_eagle3(folder / "head3", head_dim=16)
    return folder


def load(folder: Path, **settings: Any) -> LLM:
    own: dict[str, Any] = {"dtype": "float32", "shape": DraftShape(2, 2, 4), "adaptive_drafts": False}
    small: dict[str, Any] = {"max_model_len": 32, "max_num_seqs": 1, "block_size": 8, "kv_cache_memory": 1 << 18}
    return LLM(folder / "target", folder / "head3", prefill_stretch=0, **own, **{**small, **settings})


def texts(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.mark.long
def test_tokens_are_those_of_one_rank_and_graphs_hold_the_collectives(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(folder) as llm:
        expected = texts(llm)
    monkeypatch.setattr(SimulatedNCCL, "timeouts", [])
    with simulated_rank(monkeypatch, 0) as gpu, load(folder, device="cuda", tensor_parallel_size=SIZE) as llm:
        assert llm.engine.worker.runner.graphs is not None
        # In each captured pass: the embedding's sum, and two a layer.
        assert SimulatedNCCL.num_captured > 0
        assert SimulatedNCCL.num_captured % (1 + 2 * 2) == 0
        # The ranks connect with the first one, which may take long.
        first, *others = (timeout.total_seconds() for timeout in SimulatedNCCL.timeouts)
        assert first == CONNECT_TIMEOUT
        assert set(others) == {COLLECTIVE_TIMEOUT}
        gpu.waits.clear()
        assert texts(llm) == expected
        assert llm.stats().drafts_verified > 0
        assert set(gpu.waits) == {"specdec.kernels.types.upload: synchronize of an event"}


@pytest.mark.long
def test_stages_replay_their_own_layers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows go through the stages in two groups, which share the memory of the graphs."""
    with load(folder, max_num_seqs=2) as llm:
        expected = texts(llm)
    run, replays = StageExchange.run, list[int]()

    def noted(*arguments: Any) -> Tensor:
        before = gpu.counts.replays
        states = run(*arguments)
        replays.append(gpu.counts.replays - before)
        return states

    with (
        simulated_rank(monkeypatch, 0) as gpu,
        load(folder, device="cuda", pipeline_parallel_size=SIZE, max_num_seqs=2) as llm,
    ):
        monkeypatch.setattr(StageExchange, "run", noted)
        assert texts(llm) == expected
        assert llm.stats().drafts_verified > 0
    assert set(replays) == {1}
