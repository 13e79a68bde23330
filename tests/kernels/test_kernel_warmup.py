"""What an engine on a GPU launches for its users, it has launched at start: no request waits for a compilation."""

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import LLM, DraftShape, LoRARequest, SamplingParams
from specdec.building.rehearsal import warmup_kinds
from specdec.kv_transfer.offloading_connector import OffloadingConnector
from tests.fakes import save_random_eagle3, save_random_llama
from tests.lora_adapters import save_adapter, save_draft_adapter
from tests.new_groups import new_group
from tests.profiles import by_day
from tests.simulated_gpu import GPU, simulated_gpu
from tests.triton_launches import recorded_launches

pytestmark = pytest.mark.slow

# Sampling, and the tokens of the prompt: with each height of attention's tiles.
ASKED = (
    ({"temperature": 0.0}, 8),
    ({"temperature": 1.0}, 8),
    ({"temperature": 0.7, "top_k": 5}, 8),
    ({"temperature": 0.0, "repetition_penalty": 1.1}, 8),
    ({"temperature": 0.7, "n": 2}, 8),
    # The text comes true, so its chains have as many levels as trees may have nodes.
    ({"temperature": 0.0, "logit_bias": {9: 100.0}, "prediction": [9] * 24, "max_tokens": 24}, 8),
    ({"temperature": 0.0}, 10),
    ({"temperature": 0.0}, 40),
)
EAGER = {"enforce_eager": True}

# Acceptance rule, what drafts, the largest trees, and other settings.
CASES = [
    ("rejection", "head", DraftShape(1, 2, 16), {}),
    ("rejection", "head", DraftShape(2, 2, 4), EAGER | {"enable_lora": True, "max_lora_rank": 8}),
    ("rejection", "head", DraftShape(2, 2, 4), {}),
    ("coupled", "head", DraftShape(2, 2, 4), {}),
    ("coupled", "ngram", DraftShape(2, 1, 2), EAGER),
    ("coupled", "ngram", DraftShape(2, 1, 2), {}),
    # Trees on both sides of what a word of bits and the least block of a walk hold.
    ("rejection", "head", DraftShape(4, 20, 80), {}),
    ("coupled", "head", DraftShape(4, 20, 80), EAGER),
]


@pytest.mark.long
@pytest.mark.parametrize(("verify", "draft", "shape", "settings"), by_day(CASES, 2))
def test_requests_launch_nothing_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: str, draft: str, shape: DraftShape, settings: Any
) -> None:
    """Scores are in bfloat16 where nothing changes them, else in float32; with drafts, drawn drafts, and none."""
    target = save_random_llama(tmp_path / "target", head_dim=16)
    save_random_eagle3(tmp_path / "head", head_dim=16)
    adapter = None
    if "enable_lora" in settings:
        folders = save_adapter(tmp_path / "own", target), save_draft_adapter(tmp_path / "drafts", tmp_path / "head")
        adapter = LoRARequest("own", 1, *map(str, folders))
    monkeypatch.setattr("specdec.building.engine_builder.warmup_kinds", warmup_kinds)
    with simulated_gpu(monkeypatch), recorded_launches() as found:
        llm = LLM(
            tmp_path / "target",
            tmp_path / draft if draft == "head" else draft,
            **{"device": "cuda", "dtype": "bfloat16", "verify": verify, "shape": shape, **settings},
            **{"prefill_stretch": 0, "max_model_len": 64, "max_num_seqs": 2, "block_size": 8, "adaptive_drafts": False},
            kv_cache_memory=1 << 19,
        )
        at_start = set(found)
        for seed, (asked, length) in enumerate(ASKED):
            params = SamplingParams(**{"seed": seed, "max_tokens": 4, "ignore_eos": True, **asked})
            prompt = ([5 + seed, 6, 7] * length)[:length]
            for request in new_group(llm, prompt, params, lora_request=adapter).requests:
                llm.engine.scheduler.add(request)
            while llm.engine.has_unfinished:
                llm.engine.step()
            new = [found[line].label for line in found if line not in at_start]
            assert not new, asked
        for length in (4, 40):
            # A prompt beside the trees of another request.
            for prompt in ([5, 6, 7], [7] * length):
                params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
                llm.engine.scheduler.add(new_group(llm, prompt, params, lora_request=adapter).requests[0])
                for _ in range(2):
                    llm.engine.step()
            for request in list(llm.engine.scheduler.running):
                llm.engine.scheduler.abort(request)
            new = [found[line].label for line in found if line not in at_start]
            assert not new, length
        assert llm.stats().drafts_verified > 0


@pytest.mark.long
def test_a_connector_launches_nothing_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copies from and to the device."""
    save_random_llama(tmp_path / "target", head_dim=16)
    connector = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20}}
    with (
        simulated_gpu(monkeypatch),
        recorded_launches() as found,
        LLM(
            tmp_path / "target", device="cuda", kv_cache_memory=1 << 18, max_model_len=64, block_size=8,
            max_num_seqs=1, enforce_eager=True, adaptive_drafts=False, prefill_stretch=0, kv_transfer_config=connector,
        ) as llm,
    ):  # fmt: skip
        at_start, own = set(found), llm.engine.connector
        llm.generate([[*range(5, 15)]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        assert isinstance(own, OffloadingConnector)
        assert any(own.tier._parts), "blocks were stored"
        with torch.cuda.device(GPU):
            own.start_load_kv([0], [0])
        copies = {line: launch.label for line, launch in found.items() if launch.kernel.endswith(":copy_kernel")}
        assert copies
        assert not [copies[line] for line in copies.keys() - at_start]
