"""Small training runs: a target that can be trained for, its own words as data, and the command."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import LLM, DraftShape, SamplingParams
from specdec.config import EAGLE2_SHAPE
from specdec.core.outputs import SpeculationStats
from specdec.train_eagle.evaluation.head_evaluation import answer, engine
from specdec.train_eagle.program import main as program
from specdec.train_eagle.training.read_config import read_config
from specdec.train_eagle.training.train_config import TrainConfig
from specdec.train_eagle.training.training_state import SavedRun, saved_run
from tests import stages
from tests.word_llama import WORDS, save_word_llama

REPOSITORY = Path(__file__).parents[1]


def save_target(folder: Path) -> Path:
    """Write a target of seven layers."""
    save_word_llama(folder, num_hidden_layers=7)
    return folder


def save_own_words(folder: Path, target: Path) -> Path:
    """Write 64 conversations of the target's own words, and return them as prepared data."""
    llm = LLM(target, draft=None, dtype="float32")
    prompts = torch.randint(5, 85, (64, 4), generator=torch.Generator().manual_seed(1)).tolist()
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with (folder / "answers.jsonl").open("w") as lines:
        for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
            chat = [
                {"role": "user", "content": " ".join(WORDS[token - 5] for token in prompt)},
                {"role": "assistant", "content": " ".join(WORDS[t - 5] for t in output.token_ids if 5 <= t < 85)},
            ]
            lines.write(json.dumps({"messages": chat}) + "\n")
    stages.prepare(target, [folder / "answers.jsonl"], folder / "prepared")
    return folder / "prepared"


def measure_tau(
    target: Path,
    head: Path,
    prompts: list[list[int]],
    temperature: float = 0.0,
    max_tokens: int = 96,
    shape: DraftShape = EAGLE2_SHAPE,
    dtype: str = "auto",
) -> SpeculationStats:
    """Tau by the engine, with every tree as large as `shape` allows and seeds 0, 1, …"""
    with engine(target, head, shape, dtype, max(map(len, prompts)) + max_tokens) as llm:
        return SpeculationStats.total(output.stats for output in answer(llm, prompts, temperature, max_tokens))


def config(target: Path, data: Path, out: Path, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "model": target,
        "data": [data],
        "out": out,
        "held_out": 4,
        "epochs": 2,
        "batch_tokens": 200,
        "warmup_steps": 2,
        "lr": 3e-3,
        "unroll": 3,
        "mixed_precision": "no",
        "evaluate_prompts": 0,
        **changes,
    }
    return read_config(settings)


def losses(out: Path) -> list[float]:
    records = [json.loads(line) for line in (out / "run" / "log.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


def command(target: Path, data: Path, out: Path, *more: str) -> list[str]:
    words = ["--model", target, "--data", data, "--out", out, "--held-out", "4"]
    words += ["--batch-tokens", "200", "--warmup-steps", "2", "--lr", "3e-3", "--unroll", "2", "--noise", "0.05"]
    words += ["--mixed-precision", "no", "--evaluate-prompts", "0", *more]
    return [str(word) for word in words]


def main(words: list[str], code: int = 0) -> None:
    """`specdec train`, with its exit code."""
    with pytest.raises(SystemExit) as ended:
        program(["train", *words])
    assert ended.value.code == code


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def last(out: Path) -> SavedRun:
    saved = saved_run(out / "run")
    assert saved is not None
    return saved
