"""What a step asks of the GPU, counted on a simulated one: each upload, operation and launch takes the host time.

    SPECDEC_RECORD_COUNTS=1 python -m pytest tests/specdec/test_gpu_counts.py

writes the counts of one request at temperature 0 to `benchmarks/results/gpu_counts.json`, from which the table in
docs/gpu.md is made. Other tests and runs fail where a step asks for more.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from specdec import LLM, DraftShape, SamplingParams
from tests.fakes import save_random_eagle3, save_random_llama, save_random_qwen3
from tests.new_groups import new_group
from tests.profiles import by_day
from tests.simulated_gpu import SimulatedGPU

pytestmark = pytest.mark.slow

COUNTS = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_counts.json"
# Trees by requests, and tokens of the captured passes, which take long on the simulated GPU.
SHAPES = {1: DraftShape(6, 2, 12), 4: DraftShape(3, 2, 3), 32: DraftShape(2, 2, 3)}
BUCKETS = {32: ((32, 32), (128, 128))}
# Most uploads, operations of torch, launches outside graphs, and graphs. Copies into a graph's inputs are operations.
PLAIN = {"upload": 1, "operation": 6, "launch": 2, "replay": 1}
SPECULATIVE = {"upload": 1, "operation": 13, "launch": 4, "replay": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("counted")
    save_random_llama(folder / "target", head_dim=16)
    save_random_eagle3(folder / "head3", head_dim=16)
    return folder


CASES = [
    (requests, draft, most, temperature)
    for temperature, requests in ((0.0, 1), (0.8, 4), (0.0, 4), (0.8, 1), (0.0, 32), (0.8, 32))
    for draft, most in ((None, PLAIN), ("head3", SPECULATIVE))
]


@pytest.mark.parametrize(("requests", "draft", "most", "temperature"), by_day(CASES, 4, short=2))
def test_a_step_asks_for_little(
    folder: Path,
    gpu: SimulatedGPU,
    monkeypatch: pytest.MonkeyPatch,
    requests: int,
    draft: str | None,
    most: dict[str, int],
    temperature: float,
) -> None:
    if requests in BUCKETS:
        monkeypatch.setattr("specdec.verify.pass_graphs.TOKEN_BUCKETS", BUCKETS[requests])
    llm = LLM(
        folder / "target",
        folder / draft if draft else None,
        device="cuda",
        dtype="float32",
        shape=SHAPES[requests],
        adaptive_drafts=False,
        prefill_stretch=0,
        max_model_len=64,
        max_num_seqs=requests,
        block_size=8,
        kv_cache_memory=requests << 19,
    )
    for index in range(requests):
        params = SamplingParams(temperature=temperature, seed=index, max_tokens=30, ignore_eos=True)
        for request in new_group(llm, [5 + index, 6, 7, 8], params).requests:
            llm.engine.scheduler.add(request)
    for _ in range(2):
        llm.engine.step()
    for _ in range(2):
        gpu.waits.clear()
        gpu.counts.take()
        llm.engine.step()
        # While the host plans the next step, the GPU computes its pass, or drafts for it.
        assert gpu.counts.left == [1]
        places = gpu.counts.places
        found = {"left": gpu.counts.left[0], **gpu.counts.take()}
        assert len(gpu.waits) == 1
        if (requests, temperature) == (1, 0.0):
            _check_recorded(
                "drafts" if draft else "plain", {kind: found.get(kind, 0) for kind in (*most, "left")}, places
            )
        assert all(found.get(kind, 0) <= bound for kind, bound in most.items()), (found, places)


def _check_recorded(kind: str, found: dict[str, int], places: Any) -> None:
    """Hold the counts of a step against the table's, or write them there."""
    recorded = json.loads(COUNTS.read_text(encoding="utf-8"))
    if os.environ.get("SPECDEC_RECORD_COUNTS"):
        recorded["now"][kind] = found
        COUNTS.write_text(json.dumps(recorded, indent=2) + "\n", encoding="utf-8")
    assert recorded["now"][kind] == found, places


def kernels_of_a_step(llm: LLM, gpu: SimulatedGPU, prompt: list[int]) -> tuple[int, Any]:
    """Return the launches and operations of a prompt's third step, without graphs, and where they were asked for."""
    for request in new_group(llm, prompt, SamplingParams(temperature=0, max_tokens=30)).requests:
        llm.engine.scheduler.add(request)
    for _ in range(2):
        llm.engine.step()
    gpu.counts.take()
    llm.engine.step()
    places, counts = gpu.counts.places, gpu.counts.take()
    return counts["launch"] + counts["operation"], places


@pytest.mark.long
@pytest.mark.parametrize(("known", "qk_norm", "most"), [(8, False, 6), (150, False, 7), (8, True, 6), (150, True, 7)])
def test_a_layer_takes_few_small_kernels(
    tmp_path: Path, gpu: SimulatedGPU, known: int, qk_norm: bool, most: int
) -> None:
    """Beside four products: two norms, of which one adds, a sum, rotation, attention, its join, and the gate."""
    found = []
    for layers in (1, 3):
        folder = tmp_path / str(layers)
        (save_random_qwen3 if qk_norm else save_random_llama)(folder, head_dim=16, num_hidden_layers=layers)
        llm = LLM(
            folder,
            None,
            device="cuda",
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=1,
            kv_cache_memory=1 << 19,
        )
        found.append(kernels_of_a_step(llm, gpu, [5] * known))
    (of_one, _), (of_three, places) = found
    assert of_three - of_one == 2 * (4 + most), places


@pytest.mark.long
def test_a_level_of_drafting_takes_few_kernels(folder: Path, gpu: SimulatedGPU) -> None:
    """Beside five products and a layer's seven: embedding, two norms and their join, rotation, states, top k, frontier.

    The nodes of all levels are chosen by one more.
    """
    found = []
    for depth in (5, 6):
        llm = LLM(
            folder / "target",
            folder / "head3",
            device="cuda",
            dtype="float32",
            shape=DraftShape(depth, 2, 12),
            adaptive_drafts=False,
            prefill_stretch=0,
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=1,
            block_size=8,
            kv_cache_memory=1 << 19,
        )
        found.append(kernels_of_a_step(llm, gpu, [5, 6, 7, 8]))
    (of_five, _), (of_six, places) = found
    assert of_six - of_five == 20, places
