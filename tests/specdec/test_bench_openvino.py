"""The adapter of OpenVINO GenAI, on a stand-in for its modules that continues texts by a rule."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specdec.bench.peers import PeerSetup, load_peer, parse_peers
from tests.specdec.continued_text import continued

PROMPTS = [[5, 6, 7], [1, 2, 1, 2, 1, 2], [3], [9, 9], [4, 1]]


class Status(Enum):
    RUNNING, FINISHED, IGNORED = range(3)


class FakeHandle:
    """A request, whose drafts are accepted in every second step. A prompt of a single 0 is not answered."""

    def __init__(self, prompt: list[int], config: Any) -> None:
        self.status = Status.IGNORED if prompt == [0] else Status.RUNNING
        self.left = continued(prompt, config.max_new_tokens, config.stop_token_ids)
        self.most = 1 + getattr(config, "num_assistant_tokens", 0)
        self.steps = 0
        self.new: list[int] = []

    def step(self) -> None:
        count = self.most if self.steps % 2 else 1
        self.steps += 1
        self.new, self.left = self.left[:count], self.left[count:]
        self.status = self.status if self.left else Status.FINISHED

    def can_read(self) -> bool:
        return bool(self.new)

    def read(self) -> dict[int, Any]:
        new, self.new = self.new, []
        return {0: SimpleNamespace(generated_ids=new)}

    def get_status(self) -> Status:
        return self.status


class FakePipeline:
    """What the adapter uses of `ContinuousBatchingPipeline`."""

    def __init__(self, folder: str, scheduler: Any, device: str, properties: dict[str, Any]) -> None:
        if not (Path(folder) / "openvino_model.xml").read_text():
            raise RuntimeError("Exception from src/core.cpp:117:\nCheck failed at read.cpp:3:\nUnable to read\n\n")
        self.loaded = (folder, scheduler, device, properties)
        self.running: list[FakeHandle] = []
        self.configs: list[Any] = []
        self.most = 0

    def add_request(self, number: int, ids: Any, config: Any) -> FakeHandle:
        assert (ids.dtype, ids.shape[0], number) == (np.int64, 1, len(self.configs))
        if ids.max() > 99:
            raise RuntimeError("Exception from src/core.cpp:117:\nno such token\n")
        self.configs.append(config)
        self.running.append(FakeHandle(ids[0].tolist(), config))
        return self.running[-1]

    def step(self) -> None:
        self.most = max(self.most, len(self.running))
        for handle in self.running:
            handle.step()
        self.running = [handle for handle in self.running if handle.status is Status.RUNNING]


@pytest.fixture
def _genai(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    genai, runtime = ModuleType("openvino_genai"), ModuleType("openvino")
    for name, value in {
        "ContinuousBatchingPipeline": FakePipeline,
        "GenerationConfig": SimpleNamespace,
        "GenerationStatus": Status,
        "SchedulerConfig": SimpleNamespace,
        "draft_model": lambda folder, device: ("draft", folder, device),
    }.items():
        setattr(genai, name, value)
    runtime.Tensor = lambda array: array  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    monkeypatch.setitem(sys.modules, "openvino", runtime)
    monkeypatch.delitem(sys.modules, "specdec.bench.openvino_peer", raising=False)
    yield
    sys.modules.pop("specdec.bench.openvino_peer", None)


@pytest.fixture
def ir(tmp_path: Path) -> str:
    (tmp_path / "openvino_model.xml").write_text("<net/>")
    return str(tmp_path)


def setup(draft: str | None = None, **settings: str) -> PeerSetup:
    return PeerSetup("peer", Path("model"), "float32", 40, 8, frozenset(), draft, settings)


@pytest.mark.usefixtures("_genai")
@pytest.mark.parametrize(
    ("draft", "settings", "wanted", "seats"),
    [
        (None, {"batch": "2"}, {}, 2),
        (None, {}, {}, 8),
        ("ngram", {"tokens": "2"}, {"num_assistant_tokens": 2, "max_ngram_size": 3}, 8),
        ("{ir}", {}, {"num_assistant_tokens": 3}, 8),
        (
            "{ir}",
            {"tokens": "2", "branching": "4"},
            {"num_assistant_tokens": 2, "branching_factor": 4, "tree_depth": 4},
            1,
        ),
        ("{ir}", {"depth": "2"}, {"num_assistant_tokens": 8, "branching_factor": 3, "tree_depth": 2}, 1),
    ],
)
def test_every_prompt_is_answered(
    ir: str, draft: str | None, settings: dict[str, str], wanted: dict[str, int], seats: int
) -> None:
    head = draft and draft.format(ir=ir)
    peer: Any = load_peer("openvino", setup(head, ir=ir, **settings))
    run = peer.run(PROMPTS)
    assert [sample.token_ids for sample in run.samples] == [continued(prompt, 8) for prompt in PROMPTS]
    assert all(0 < sample.first < sample.seconds <= run.seconds for sample in run.samples)
    # The first token comes with the prompt, those of later steps with 1 or all accepted drafts in turn.
    most, left, sizes = 1 + wanted.get("num_assistant_tokens", 0), 7, list[int]()
    while left:
        sizes.append(min(left, 1 if len(sizes) % 2 else most))
        left -= sizes[-1]
    for sample in run.samples:
        assert (sample.stats.steps, sample.stats.tokens) == (len(sizes), 7)
        assert sum(sample.stats.accepted_per_depth) == 7 - len(sizes)
    pipeline = peer._pipeline
    folder, scheduler, device, properties = pipeline.loaded
    assert (folder, device, pipeline.most) == (ir, "CPU", min(seats, len(PROMPTS)))
    assert scheduler.num_kv_blocks * 32 >= seats * (40 + most)
    assert scheduler.max_num_batched_tokens >= seats * 40
    assert (scheduler.max_num_seqs, scheduler.enable_prefix_caching) == (seats, False)
    assert scheduler.dynamic_split_fuse is (draft != "{ir}")
    assert properties.get("draft_model") == (("draft", ir, "CPU") if draft == "{ir}" else None)
    assert properties.get("prompt_lookup", False) is (draft == "ngram")
    for config in pipeline.configs:
        given = vars(config)
        plain = {"do_sample": False, "max_new_tokens": 8, "ignore_eos": True, "stop_token_ids": set()}
        assert given == plain | wanted


@pytest.mark.usefixtures("_genai")
@pytest.mark.parametrize(
    ("dtype", "computed", "cached"), [("float32", "f32", "f32"), ("bfloat16", "bf16", "f16"), ("float16", "f16", "f16")]
)
def test_precision_is_the_checkpoints(ir: str, dtype: str, computed: str, cached: str) -> None:
    modes: list[tuple[str | None, dict[str, str], str]]
    modes = [(None, {}, cached), (ir, {}, cached), (ir, {"depth": "2"}, "f32")]
    for draft, settings, wanted in modes:
        peer: Any = load_peer("openvino", replace(setup(draft, ir=ir, **settings), dtype=dtype))
        properties = peer._pipeline.loaded[3]
        assert (properties["INFERENCE_PRECISION_HINT"], properties["KV_CACHE_PRECISION"]) == (computed, wanted)


@pytest.mark.usefixtures("_genai")
def test_answers_end_at_end_tokens(ir: str) -> None:
    ends = (5, 2)
    peer: Any = load_peer("openvino", replace(setup("ngram", ir=ir), end_tokens=frozenset(ends)))
    run = peer.run(PROMPTS)
    assert [sample.token_ids for sample in run.samples] == [continued(prompt, 8, ends) for prompt in PROMPTS]
    assert {len(sample.token_ids) for sample in run.samples} != {8}
    config = peer._pipeline.configs[0]
    assert (config.ignore_eos, config.stop_token_ids) == (False, set(ends))


@pytest.mark.usefixtures("_genai")
def test_mistakes_are_told(ir: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "openvino_model.xml").touch()
    for draft, settings, message in (
        (None, {}, "needs the target as exported by optimum-intel; write peer:ir=FOLDER"),
        (None, {"ir": "/no"}, "/no: no openvino_model.xml in it; ir and heads are folders that optimum-intel exported"),
        ("/no", {"ir": ir}, "/no: no openvino_model.xml in it; "),
        (None, {"ir": str(empty)}, "OpenVINO cannot load these folders: Unable to read$"),
        (None, {"ir": ir, "depth": "3"}, "depth is for trees, which need a head; name its folder"),
        ("ngram", {"ir": ir, "branching": "3"}, "branching is for trees, which need a head; name its folder"),
        (ir, {"ir": ir, "branching": "0"}, "branching is '0'; it must be a whole number of at least 1"),
    ):
        with pytest.raises(ValueError, match=f"^--peer 'peer': {message}"):
            load_peer("openvino", setup(draft, **settings))
    with pytest.raises(ValueError, match="OpenVINO cannot compute in float64; dtype must be one of float32, bfloat16"):
        load_peer("openvino", replace(setup(ir=ir), dtype="float64"))


@pytest.mark.usefixtures("_genai")
def test_failures_are_told(ir: str) -> None:
    for prompt, message in (
        ([100], "OpenVINO failed: no such token"),
        ([0], "OpenVINO failed: a request of 1 tokens ended as IGNORED"),
    ):
        with pytest.raises(ValueError, match=f"^--peer 'peer': {message}$"):
            load_peer("openvino", setup(ir=ir)).run([[1, 2], prompt])


def test_what_to_install_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.bench.peers.find_spec", lambda _: None)
    with pytest.raises(ValueError, match="openvino-genai is not installed; run: pip install openvino-genai"):
        parse_peers(["openvino:ngram:ir=folder"])
