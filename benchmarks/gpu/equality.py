"""Compare the engine's tokens on the GPU with those without drafts, and with those of a CPU, in float32.

A stage of `benchmarks.gpu.day`, on the demo with each of its heads, and on SmolLM2-135M-Instruct with each head under
`heads/` where the variable SMOLLM2 names its GGUF file or its folder (`benchmarks.smollm2` fetches it). At temperature
0 and 1, with CUDA graphs and trees of fixed size. In bfloat16, tokens with and without drafts are compared as well, but
may differ: its roundings depend on the number of rows, and two tokens may nearly tie.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.gpu.day import ROOT
from benchmarks.gpu.stage import Stage
from benchmarks.report import read_prompts
from specdec import LLM, DraftShape, SamplingParams

TEMPERATURES = (0.0, 1.0)

Outputs = dict[float, list[Sequence[int]]]


@dataclass(frozen=True)
class Sizes:
    """Number of requests and tokens that are generated.

    Attributes:
        requests: in one batch.
        prompt, output: tokens of each request, of its prompt at most.
        shape: of the draft trees.
        cache: bytes for keys and values.
    """

    requests: int
    prompt: int
    output: int
    shape: DraftShape
    cache: int


FULL = Sizes(16, 400, 64, DraftShape(6, 10, 60), 1 << 30)
TINY = Sizes(2, 9, 5, DraftShape(2, 2, 4), 1 << 20)


@dataclass(frozen=True)
class Subject:
    """A target, None for the demo, and its heads."""

    name: str
    target: Path | None
    heads: tuple[str, ...]


def run(stage: Stage) -> None:
    sizes = TINY if stage.rehearse else FULL
    subjects = [Subject("demo", None, ("eagle3",) if stage.rehearse else ("eagle3", "eagle", "dspark"))]
    smollm2 = os.environ.get("SMOLLM2")
    if smollm2:
        heads = sorted(str(head) for head in (ROOT / "heads").glob("smollm2-135m-instruct-*"))
        subjects.append(Subject("SmolLM2-135M-Instruct", Path(smollm2), tuple(heads)))
    else:
        stage.figures["skipped"] = "SmolLM2-135M-Instruct: the variable SMOLLM2 names no GGUF file or folder of it"
        stage.show(f"skipped: {stage.figures['skipped']}")
    rows: list[dict[str, Any]] = []
    stage.figures["rows"] = rows
    stage.table = Table("target", "head", "dtype", "temperature", "requests", "as without drafts", "as on the CPU")
    for subject in subjects:
        # In plain torch, which has no compiled kernels of its own.
        cpu = generate(subject, None, "float32", sizes, device="cpu", kernels="torch")
        for dtype in ("float32",) if stage.rehearse else ("float32", "bfloat16"):
            on_device = {"device": str(stage.device), "kernels": "triton"}
            plain = generate(subject, None, dtype, sizes, **on_device)
            for head in (None, *subject.heads):
                drafted = plain if head is None else generate(subject, head, dtype, sizes, **on_device)
                for temperature in TEMPERATURES:
                    found = drafted[temperature]
                    row = {
                        "target": subject.name,
                        "head": None if head is None else Path(head).name,
                        "dtype": dtype,
                        "temperature": temperature,
                        "requests": len(found),
                        "differs_from_plain": differences(found, plain[temperature]),
                        "differs_from_cpu": differences(found, cpu[temperature]),
                    }
                    rows.append(row)
                    stage.show(str(row))
                    stage.failures += failures_of(row)
                    _add(stage.table, row)


def generate(subject: Subject, head: str | None, dtype: str, sizes: Sizes, **settings: Any) -> Outputs:
    """Return the tokens of all prompts in one batch, at each temperature.

    Raises:
        ValueError: there is a head, and nothing was drafted.
    """
    with LLM(
        subject.target,
        head,
        dtype=dtype,
        shape=sizes.shape,
        adaptive_drafts=False,
        prefill_stretch=0,
        max_model_len=sizes.prompt + sizes.output,
        max_num_seqs=sizes.requests,
        kv_cache_memory=sizes.cache,
        **settings,
    ) as llm:
        prompts = [llm.chat_prompt(turns)[: sizes.prompt] for turns in read_prompts("sgd-eval")[: sizes.requests]]
        outputs: Outputs = {}
        for temperature in TEMPERATURES:
            params = [
                SamplingParams(temperature=temperature, seed=seed, max_tokens=sizes.output, ignore_eos=True)
                for seed in range(len(prompts))
            ]
            outputs[temperature] = [one.token_ids for one in llm.generate(prompts, params, use_tqdm=False)]
        if head is not None and not llm.stats().drafts_verified:
            raise ValueError(f"{subject.name}, {head}: nothing was drafted")
    return outputs


def differences(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return requests that differ, each with the place of its first token that does."""
    differing = []
    for request, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        pairs = enumerate(zip(ours, theirs, strict=False))
        place = next((place for place, (own, other) in pairs if own != other), min(len(ours), len(theirs)))
        if place < max(len(ours), len(theirs)):
            differing.append([request, place])
    return differing


def failures_of(row: dict[str, Any]) -> list[str]:
    """Return what is wrong with a row; in bfloat16 nothing is."""
    if row["dtype"] != "float32":
        return []
    name = f"{row['target']}, head {row['head']}, temperature {row['temperature']}"
    kinds = {"without drafts": row["differs_from_plain"], "on the CPU": row["differs_from_cpu"]}
    return [
        f"{name}: {len(found)} of {row['requests']} requests have other tokens than {where}; the first, {found[0][0]}, "
        f"from its token {found[0][1]} on"
        for where, found in kinds.items()
        if found
    ]


def _add(table: Table, row: dict[str, Any]) -> None:
    equal = [str(row["requests"] - len(row[name])) for name in ("differs_from_plain", "differs_from_cpu")]
    names = (row["target"], row["head"] or "none", row["dtype"], str(row["temperature"]), str(row["requests"]))
    table.add_row(*names, *equal)
