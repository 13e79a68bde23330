"""Evaluation of a head: tokens per target step and speed, measured by the engine itself, and accuracy."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from specdec.bench.environment import environment
from specdec.config import EAGLE2_SHAPE, default_shape
from specdec.core.device import resolve_device
from specdec.core.outputs import RequestOutput, SpeculationStats
from specdec.core.sampling_params import SamplingParams
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.kernels.types.settings import KernelChoice
from specdec.llm import LLM
from specdec.models.head_fit import check_draft
from specdec.models.tokenizer import vocabulary_digest
from specdec.train_eagle.data.chat_prompts import read_prompts
from specdec.train_eagle.data.conversations import BadData, open_source
from specdec.train_eagle.data.provenance import WEIGHTS, file_digest
from specdec.train_eagle.evaluation.accuracy import accuracy, head_of
from specdec.train_eagle.evaluation.evaluation import Evaluation, Measured
from specdec.train_eagle.evaluation.speed import measure_speed

# Requests at once, and tokens of a step besides their trees.
SEATS = 32
PROMPT_TOKENS = 1 << 14
# Heads of a training run are compared by EAGLE-2's published tree.
SHAPE = EAGLE2_SHAPE


def measure_tau(
    model: Path,
    head: Path,
    prompts: Sequence[list[int]],
    temperature: float = 0.0,
    max_tokens: int = 96,
    shape: DraftShape = SHAPE,
    dtype: str = "auto",
) -> SpeculationStats:
    """Measure tau on prompts (token ids) with every tree as large as `shape` allows and seeds 0, 1, …"""
    llm = engine(model, head, shape, dtype)
    return SpeculationStats.total(output.stats for output in answer(llm, prompts, temperature, max_tokens))


def engine(model: Path, head: Path, shape: DraftShape, dtype: str, kernels: KernelChoice = "auto") -> LLM:
    """Build an engine whose token budget has room for every row's whole tree in every step, prompts included."""
    return LLM(
        model,
        head,
        dtype=dtype,
        kernels=kernels,
        shape=shape,
        adaptive_drafts=False,
        max_num_seqs=SEATS,
        max_num_batched_tokens=SEATS * (1 + shape.nodes) + PROMPT_TOKENS,
    )


def answer(llm: LLM, prompts: Sequence[list[int]], temperature: float, max_tokens: int) -> list[RequestOutput]:
    """Answer prompts with seeds 0, 1, …"""
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens) for i in range(len(prompts))]
    return llm.generate(list(prompts), params, use_tqdm=False)


def accepted_shares(stats: SpeculationStats) -> list[float]:
    """Return the share of steps that accept a draft token of depth 1, 2, …"""
    return [round(count / max(1, stats.steps), 4) for count in stats.accepted_per_depth]


def evaluate(
    model: Path,
    draft: Path,
    domains: Mapping[str, str | Path],
    bad: BadData,
    temperatures: Sequence[float] = (0.0, 1.0),
    limit: int | None = 100,
    max_tokens: int = 128,
    shape: DraftShape | None = None,
    dtype: str = "auto",
    speed_prompts: int = 0,
) -> Evaluation:
    """Measure a head.

    Args:
        domains: files or data sets of conversations, by a name for each.
        bad: counts the entries that are left out.
        limit: most entries per domain.
        shape: bounds of draft trees; None for those of `specdec generate` on this device, and besides them EAGLE-2's.
        speed_prompts: prompts per domain that are answered with and without the head to measure its speed.

    Raises:
        ValueError: a setting, a source, the target or the head is unusable.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; it must be at least 1")
    for temperature in temperatures:
        SamplingParams(temperature=temperature, max_tokens=max_tokens)
    sources = {name: open_source(source) for name, source in domains.items()}
    serving = shape or default_shape(resolve_device("auto").type)
    shapes = [serving] if shape is not None else list(dict.fromkeys((serving, EAGLE2_SHAPE)))
    check_draft(draft, model)
    # Accuracy runs the layers with an attention of its own, which layers in one call do not take.
    llm = engine(model, draft, serving, dtype, "auto" if torch.cuda.is_available() else "torch")
    head_of(llm)
    if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        raise ValueError(f"{model}: no chat template; add a chat_template.jinja to the folder")
    prompts = {name: read_prompts(llm, source, limit, max_tokens, bad) for name, source in sources.items()}
    measured, accuracies = [], {}
    # As generate builds them: with any kernels, and trees that adapt.
    pair = [LLM(model, head, dtype=dtype, shape=serving) for head in (draft, None)] if speed_prompts else []
    others = [engine(model, draft, other, dtype) for other in shapes[1:]]
    for name, asked in prompts.items():
        # Accuracy is measured on greedy answers, which are always made.
        answers = {t: answer(llm, asked, t, max_tokens) for t in dict.fromkeys((*temperatures, 0.0))}
        accuracies[name] = accuracy(llm, answers[0.0], serving.depth)
        for temperature in dict.fromkeys(temperatures):
            row = _measured(name, temperature, serving, answers[temperature])
            if pair:
                speed = measure_speed(pair[0], pair[1], asked[:speed_prompts], temperature, max_tokens)
                row = replace(row, tok_per_s=round(speed.drafted, 3), plain_tok_per_s=round(speed.plain, 3))
            measured.append(row)
            for other in others:
                measured.append(
                    _measured(name, temperature, other.config.shape, answer(other, asked, temperature, max_tokens))
                )
    facts = environment()
    machine = facts["gpu"] or f"{facts['processor']}, {facts['threads']} threads"
    made_of = vocabulary_digest(model), file_digest(draft, WEIGHTS)
    return Evaluation(str(model), str(draft), llm.config.dtype, max_tokens, measured, accuracies, machine, *made_of)


def _measured(name: str, temperature: float, shape: DraftShape, outputs: Sequence[RequestOutput]) -> Measured:
    found = SpeculationStats.total(output.stats for output in outputs)
    shares = accepted_shares(found)
    shares += [0.0] * (shape.depth - len(shares))
    return Measured(name, temperature, shape, len(outputs), round(found.tau, 4), shares, found.tokens, found.steps)
