"""Command lines of vLLM on the cards of published heads, with tiny stand-ins in folders of the names that they give.

Heads of z-lab, RedHatAI, DeepSeek and Inco, from their cards, vLLM's posts about them and the repositories that name
their commands, read in November 2026. Their targets are other families in part; what is tried is the command line. One
GPU stands for several.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import LLM, SamplingParams
from specdec.cli.app import main
from specdec.draft_heads.drafting.block_drafter import BlockDrafter
from specdec.draft_heads.formats.head_kind import write_head
from specdec.draft_heads.formats.head_kinds import KINDS
from specdec.draft_heads.heads.block_head import BlockConfig, BlockHead, MarkovConfig
from specdec.draft_heads.llama.llama_config import LlamaConfig
from tests.fakes import TINY, edit_json
from tests.specdec.world import World

pytestmark = pytest.mark.slow

# By the names on the cards: a folder of the world, or a kind of block head in speculators' layout.
STAND_INS = {
    "Qwen/Qwen3-0.6B": "small",
    "z-lab/Qwen3.5-27B-DFlash": "dflash",
    "z-lab/Qwen3-8B-DFlash-b16": "dflash",
    "incoai/Qwen3.8-27B-DFlash2": "dflash2",
    "deepseek-ai/dspark_qwen3_8b_block7": "dspark",
    "RedHatAI/Qwen3-8B-speculator.dflash": "speculators dflash",
    "RedHatAI/gemma-4-31B-it-speculator.dflash": "speculators dflash",
    "RedHatAI/GLM-5.2-speculator.dspark": "speculators dspark",
    "RedHatAI/Qwen3-8B-speculator.eagle3": "speculators eagle3",
    "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3": "speculators eagle3",
}
TARGETS = (
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3.5-27B",
    "Qwen/Qwen3.8-27B",
    "google/gemma-4-31B-it",
    "meta-llama/Llama-3.1-8B-Instruct",
    "RedHatAI/Qwen3-8B-FP8-dynamic",
    "zai-org/GLM-5.2-FP8",
)
# Words of the command line behind `vllm serve`; an object is the JSON of --speculative-config.
COMMANDS: dict[str, list[Any]] = {
    "z-lab": [
        "Qwen/Qwen3.5-27B",
        *("--speculative-config", {"method": "dflash", "model": "z-lab/Qwen3.5-27B-DFlash"}, 15),
        *("--attention-backend", "flash_attn", "--max-num-batched-tokens", 32768),
    ],
    "z-lab, in vLLM's test": [
        *("Qwen/Qwen3-8B", "--trust-remote-code", "--max-num-seqs", 128, "--gpu-memory-utilization", 0.85),
        *("--speculative-config", {"method": "dflash", "model": "z-lab/Qwen3-8B-DFlash-b16", "max_model_len": 4096}),
        16,
    ],
    "Inco": [
        "Qwen/Qwen3.8-27B",
        "--speculative-config",
        {"method": "dflash", "model": "incoai/Qwen3.8-27B-DFlash2", "attention_backend": "TRITON_ATTN"},
        7,
    ],
    "DeepSeek": [
        *("Qwen/Qwen3-8B", "--port", 8000, "--speculative-config"),
        *({"model": "deepseek-ai/dspark_qwen3_8b_block7", "method": "dspark"}, 7),
    ],
    "RedHat, DFlash": [
        *("Qwen/Qwen3-8B", "--no-async-scheduling", "--no-enable-prefix-caching", "--speculative-config"),
        *({"method": "dflash", "model": "RedHatAI/Qwen3-8B-speculator.dflash"}, 7),
    ],
    "RedHat, images off": [
        *("google/gemma-4-31B-it", "--max-num-batched-tokens", 16384, "--gpu-memory-utilization", 0.80),
        *("--enforce-eager", "--limit-mm-per-prompt", '{"image":0,"video":0}', "--speculative-config"),
        *({"method": "dflash", "model": "RedHatAI/gemma-4-31B-it-speculator.dflash"}, 8),
    ],
    "RedHat, DSpark": [
        *("zai-org/GLM-5.2-FP8", "-tp", 1, "--speculative-config"),
        {
            "method": "dspark",
            "model": "RedHatAI/GLM-5.2-speculator.dspark",
            "attention_backend": "FLASH_ATTN",
            "draft_sample_method": "greedy",
        },
        7,
    ],
    "vLLM, adaptive verification": [
        *("zai-org/GLM-5.2-FP8", "--tensor-parallel-size", 1, "--enable-expert-parallel", "--kv-cache-dtype", "auto"),
        *("--compilation-config", '{"cudagraph_mode": "FULL_AND_PIECEWISE"}', "--max-num-seqs", 256),
        "--speculative-config",
        {
            "method": "dspark",
            "model": "RedHatAI/GLM-5.2-speculator.dspark",
            "attention_backend": "FLASH_ATTN",
            "draft_sample_method": "probabilistic",
            "rejection_sample_method": "block",
            "enable_adaptive_verification": True,
        },
        7,
    ],
    "vLLM, fixed": [
        *("zai-org/GLM-5.2-FP8", "--speculative-config"),
        {
            "method": "dspark",
            "model": "RedHatAI/GLM-5.2-speculator.dspark",
            "draft_tensor_parallel_size": 1,
            "enable_adaptive_verification": False,
        },
        7,
    ],
    "RedHat, EAGLE-3": [
        *("RedHatAI/Qwen3-8B-FP8-dynamic", "--tensor-parallel-size", 1, "--gpu-memory-utilization", 0.9),
        *("--speculative-config", {"model": "RedHatAI/Qwen3-8B-speculator.eagle3", "method": "eagle3"}, 5),
    ],
    "RedHat, by options": [
        *("Qwen/Qwen3-8B", "--spec-model", "RedHatAI/Qwen3-8B-speculator.dflash"),
        *("--spec-method", "dflash", "--spec-tokens", 7),
    ],
    "RedHat, the head alone, EAGLE-3": ["RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3"],
    "RedHat, the head alone, DFlash": ["RedHatAI/Qwen3-8B-speculator.dflash"],
    "a small model": [
        "Qwen/Qwen3-8B",
        *("--speculative-config", {"method": "draft_model", "model": "Qwen/Qwen3-0.6B"}, 5),
    ],
    "suffix": ["Qwen/Qwen3-8B", "--speculative-config", {"method": "suffix"}, 5],
    "n-grams": ["Qwen/Qwen3-8B", "--speculative-config", {"method": "ngram", "prompt_lookup_max": 4}, 5],
}
TARGET_OF = {
    "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3": "meta-llama/Llama-3.1-8B-Instruct",
    "RedHatAI/Qwen3-8B-speculator.dflash": "Qwen/Qwen3-8B",
}
DEPTHS = {"RedHat, images off": 7, "z-lab": 4, "z-lab, in vLLM's test": 4, "Inco": 4, "DeepSeek": 5}


@pytest.fixture(scope="module")
def published(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a stand-in for every name."""
    root = tmp_path_factory.mktemp("published")
    for name in TARGETS:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).symlink_to(world.folder / "target")
    for name, what in STAND_INS.items():
        (root / name).parent.mkdir(exist_ok=True)
        layout, _, kind = what.rpartition(" ")
        if not layout:
            (root / name).symlink_to(world.folder / what)
        elif kind == "eagle3":
            _save_eagle3(world, root / name, TARGET_OF.get(name))
        else:
            _save_block(root / name, kind, TARGET_OF.get(name))
    return root


def _save_eagle3(world: World, folder: Path, target: str | None) -> None:
    folder.mkdir()
    source = world.folder / "head3"
    (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    layer = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(layer))
    nested = {"speculators_model_type": "eagle3", "speculators_config": {"verifier": {"name_or_path": target}}}
    edit_json(folder / "config.json", transformer_layer_config=layer, **nested)


def _save_block(folder: Path, kind: str, target: str | None) -> None:
    torch.manual_seed(0)
    layers = LlamaConfig.from_json({**TINY, "model_type": "qwen3", "num_hidden_layers": 2})
    own: dict[str, Any] = {"markov": MarkovConfig(8, "vanilla"), "confidence": True} if kind == "dspark" else {}
    shape = {"taps": (0, 2), "block_size": 8, "mask_token": layers.vocab_size - 1, "draft_vocab_size": 60}
    head = BlockHead(BlockConfig(layers, causal=(False, False), anchor_first=kind == "dspark", **shape, **own))
    head.draft_tokens.copy_(torch.arange(60))
    write_head(folder, *KINDS[kind].speculators(head, target), torch.float32)


def _words(command: list[Any]) -> list[str]:
    """Return a command's words; a number behind an object is its `num_speculative_tokens`."""
    found: list[str] = []
    for word in command:
        if found and found[-1].startswith("{") and isinstance(word, int):
            found[-1] = json.dumps({**json.loads(found[-1]), "num_speculative_tokens": word})
        else:
            found.append(json.dumps(word) if isinstance(word, dict) else str(word))
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_of_a_card_starts(
    name: str, published: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served: list[Any] = []
    monkeypatch.setattr("specdec.server.command.run", lambda *arguments: served.extend(arguments[:4]))
    monkeypatch.chdir(published)
    words = _words(COMMANDS[name])
    with pytest.raises(SystemExit) as ended:
        main(["serve", *words])
    assert ended.value.code == 0
    model, draft, settings, shape = served
    told = [record.getMessage() for record in caplog.records if "without effect here" in record.getMessage()]
    ignored = [key for key in ("attention_backend", "draft_sample_method", "max_model_len") if f'"{key}"' in str(words)]
    assert len(told) == bool(ignored)
    assert all(key in told[0] for key in ignored)

    few = {"dtype": "float64", "kv_cache_memory": 1 << 20, "max_num_seqs": 2, "adaptive_drafts": False}
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    llm = LLM(model, draft=draft, shape=shape, **{**settings, **few})
    drafter = llm.engine.worker.drafter
    if isinstance(drafter, BlockDrafter):
        assert drafter.shape.depth == DEPTHS.get(name, 7)
    (output,) = llm.generate([[3, 4, 5]], params, use_tqdm=False)
    (plain,) = LLM("Qwen/Qwen3-8B", draft=None, **few).generate([[3, 4, 5]], params, use_tqdm=False)
    assert output.token_ids == plain.token_ids
    assert llm.stats().drafts_verified > 0 or draft in ("ngram", "suffix")


def test_every_stand_in_is_tried() -> None:
    tried = " ".join(" ".join(_words(command)) for command in COMMANDS.values())
    assert all(name in tried for name in (*STAND_INS, "zai-org/GLM-5.2-FP8"))
