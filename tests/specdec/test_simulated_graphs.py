"""Captures by the rules of CUDA (streams, pools, threads, devices), and what heads and engines leave when they go."""

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import LLM, SamplingParams
from specdec.core.device import on_device
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.tree_drafter import TreeDrafter
from specdec.execution.cuda_graphs import CudaGraphs
from specdec.kv_transfer.host_blocks import Copied
from tests.fakes import save_random_eagle3, save_random_head, save_random_llama
from tests.profiles import IS_NIGHTLY
from tests.simulated_gpu import GPU, SimulatedGPU, simulated_gpu

pytestmark = pytest.mark.slow

OTHER = torch.device("cuda", 0)
# One after another in one engine.
HEADS = 10 if IS_NIGHTLY else 2
PROMPT = [5, 6, 7, 8, 9]
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("simulated graphs")
    save_random_llama(folder / "target", head_dim=16)
    for seed in range(2):
        save_random_head(folder / f"eagle {seed}", seed=seed, head_dim=16)
        save_random_eagle3(folder / f"eagle3 {seed}", seed=seed, head_dim=16)
    return folder


def load(folder: Path, head: str, device: str = "cuda", **settings: Any) -> LLM:
    own: dict[str, Any] = {"dtype": "float32", "shape": DraftShape(2, 2, 3), "adaptive_drafts": False}
    small: dict[str, Any] = {"max_model_len": 16, "max_num_seqs": 1, "block_size": 8, "kv_cache_memory": 1 << 17}
    return LLM(folder / "target", folder / head, prefill_stretch=0, device=device, **{**own, **small, **settings})


def plain_capture(work: Callable[[], Any], **settings: Any) -> torch.cuda.CUDAGraph:
    """Capture as one would first write it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **settings):
        work()
    return graph


def asked_of_a_thread(question: Callable[[], Any]) -> Any:
    """Return what a call in a thread of its own returns, or its error."""
    answers = list[Any]()

    def ask() -> None:
        try:
            answers.append(question())
        except RuntimeError as error:
            answers.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return answers[0]


@pytest.mark.usefixtures("gpu")
def test_other_threads_may_ask_for_events_during_a_capture() -> None:
    """As the reports of a connector do every 0.1 s; by CUDA's default rules that spoils the capture."""
    with on_device(GPU):
        copied, asked = Copied(is_gpu=True), list[object]()

        def work() -> torch.Tensor:
            asked.append(asked_of_a_thread(lambda: copied.is_done))
            return torch.zeros(1, device=GPU)

        CudaGraphs(GPU).capture(work)
        assert asked == [True, True]
        with pytest.raises(RuntimeError, match="previous error during capture"):
            plain_capture(work)
        assert isinstance(asked[-1], RuntimeError)
        with pytest.raises(RuntimeError, match="query of an event: operation not permitted"):
            plain_capture(lambda: copied.is_done, capture_error_mode="thread_local")


def test_allocations_of_other_threads_are_no_part_of_a_capture(gpu: SimulatedGPU) -> None:
    held = list[object]()

    def allocate() -> torch.Tensor:
        with gpu:
            return torch.zeros(1000, device=GPU)

    def work() -> torch.Tensor:
        held.append(asked_of_a_thread(allocate))
        return torch.ones(1, device=GPU)

    before = gpu.memory.general.in_use
    replay = CudaGraphs(GPU).capture(work)
    assert replay().tolist() == [1]
    assert gpu.memory.general.in_use == before + 2 * 4000
    assert gpu.memory.in_graphs == 4
    with on_device(GPU), pytest.raises(RuntimeError, match="previous error during capture"):
        plain_capture(work)
    assert str(held[-1]).startswith("allocation of device memory")


@pytest.mark.long
@pytest.mark.usefixtures("gpu")
def test_graphs_outlive_those_of_an_ended_engine() -> None:
    """A stream's workspace for cuBLAS lies in the memory of the graph that captured the stream's first product."""
    weight = torch.eye(2, device=GPU)

    def product() -> torch.Tensor:
        return weight @ weight

    ended, running = CudaGraphs(GPU), CudaGraphs(GPU)
    old, new = ended.capture(product), running.capture(product)
    assert old().tolist() == [[1, 0], [0, 1]]
    del ended, old
    gc.collect()
    assert new().tolist() == [[1, 0], [0, 1]]

    with on_device(GPU):
        pools = [torch.cuda.graph_pool_handle() for _ in range(2)]
        first, second = (plain_capture(product, pool=pool) for pool in pools)
        del first
        gc.collect()
        with pytest.raises(AssertionError, match="workspace was freed"):
            second.replay()


@pytest.mark.usefixtures("gpu")
def test_an_engine_captures_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has 32 streams to hand out, and cuBLAS 32 MiB for each that multiplies."""
    made, streams = torch.cuda.Stream, list[object]()

    def counted(device: object = None) -> Any:
        streams.append(device)
        return made(device)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.cuda, "Stream", counted)
    graphs = CudaGraphs(GPU)
    kept = [graphs.capture(lambda: torch.ones(1, device=GPU)) for _ in range(5)]
    assert (len(kept), streams) == (5, [GPU])


@pytest.mark.long
@pytest.mark.usefixtures("gpu")
def test_the_memory_of_graphs_that_are_all_gone_is_not_asked_for_again() -> None:
    """Torch refuses to capture into it."""
    graphs = CudaGraphs(GPU)
    output = graphs.capture(lambda: torch.ones(3, device=GPU))()
    gc.collect()
    assert graphs.capture(lambda: output + 1)().tolist() == [2, 2, 2]
    pool = torch.cuda.graph_pool_handle()
    with on_device(GPU):
        kept: list[torch.Tensor] = []
        plain_capture(lambda: kept.append(torch.ones(3, device=GPU)), pool=pool)
        gc.collect()
        with pytest.raises(AssertionError, match="graphs are all gone"):
            plain_capture(lambda: None, pool=pool)


@pytest.mark.usefixtures("gpu")
def test_a_graph_overwrites_what_was_not_in_use_at_its_capture() -> None:
    """So what a later graph has made is lost, and what an earlier one has made stays while a tensor holds it."""
    made: list[torch.Tensor] = []
    with on_device(GPU):
        pool = torch.cuda.graph_pool_handle()
        first, second = (plain_capture(lambda: made.append(torch.ones(1, device=GPU) + 1), pool=pool) for _ in range(2))
        first.replay()
        second.replay()
        assert [one.tolist() for one in made] == [[2], [2]]
        first.replay()
        assert made[0].tolist() == [2]
        assert made[1].isnan().all()


@pytest.mark.usefixtures("gpu")
def test_graphs_are_captured_on_the_device_of_their_engine() -> None:
    for device in (OTHER, GPU):
        assert CudaGraphs(device).capture(lambda own=device: torch.ones(2, device=own) + 1)().tolist() == [2, 2]
    with on_device(OTHER):
        plain_capture(lambda: torch.ones(1, device=OTHER))
    with on_device(GPU), pytest.raises(AssertionError, match="on a device that is not captured"):
        plain_capture(lambda: torch.ones(1, device=GPU))


@pytest.mark.usefixtures("gpu")
def test_tensors_of_two_gpus_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="expected all tensors on the same device"):
        torch.ones(2, device=GPU) + torch.ones(2, device=OTHER)
    assert torch.ones(2, device=GPU).to(OTHER).device == OTHER


@pytest.mark.long
def test_two_engines_run_on_two_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = load(folder, "eagle3 0", "cpu").generate([PROMPT], PARAMS, use_tqdm=False)[0].token_ids
    with simulated_gpu(monkeypatch):
        engines = [load(folder, "eagle3 0", f"cuda:{index}") for index in (0, 1)]
        for llm in (*engines, engines[0]):
            assert llm.engine.worker.graphs is not None
            assert llm.generate([PROMPT], PARAMS, use_tqdm=False)[0].token_ids == expected


@pytest.mark.long
@pytest.mark.parametrize(("kind", "passes_stay"), [("eagle", True), ("eagle3", False)])
def test_memory_is_flat_over_heads(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, passes_stay: bool) -> None:
    """Graphs of the head before are released first, and passes stay where they hold none of its weights."""
    taken, captures = list[int](), list[int]()
    with simulated_gpu(monkeypatch) as gpu:
        monkeypatch.setattr("specdec.verify.pass_graphs.TOKEN_BUCKETS", ((1, 1), (8, 8)))
        llm = load(folder, f"{kind} 0", verify="rejection")
        graphs = llm.engine.worker.graphs
        assert graphs is not None
        assert llm.engine.worker.runner.graphs is not None
        passes = len(llm.engine.worker.runner.graphs.captured)
        at_start, most = graphs.num_captures, gpu.memory.most_graphs
        for turn in range(HEADS):
            llm.update_draft(folder / f"{kind} {(turn + 1) % 2}")
            llm.generate(
                [PROMPT], SamplingParams(temperature=turn % 2, max_tokens=2, seed=turn, ignore_eos=True), use_tqdm=False
            )
            gc.collect()
            taken.append(gpu.memory.reserved)
            captures.append(graphs.num_captures)
        drafter = llm.engine.worker.drafter
        assert isinstance(drafter, TreeDrafter)
        assert drafter.graphs is not None
        drafting = sum(len(graphs.captured) for graphs in drafter.graphs)
        assert gpu.memory.most_graphs == most
    assert len(set(taken)) == 1, taken
    each = drafting + (0 if passes_stay else passes)
    assert at_start == drafting + passes
    assert captures == [at_start + each * (turn + 1) for turn in range(HEADS)]


@pytest.mark.long
def test_an_engine_goes_on_with_its_head_where_graphs_of_another_cannot_be_captured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load(folder, "eagle3 0", "cpu").generate([PROMPT], PARAMS, use_tqdm=False)[0].token_ids
    with simulated_gpu(monkeypatch):
        llm = load(folder, "eagle3 0")
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "graph", out_of_memory)
            with pytest.raises(torch.OutOfMemoryError):
                llm.update_draft(folder / "eagle3 1")
        before = llm.stats().drafts_accepted
        assert llm.generate([PROMPT], PARAMS, use_tqdm=False)[0].token_ids == expected
        assert llm.stats().drafts_accepted >= before


def out_of_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")
