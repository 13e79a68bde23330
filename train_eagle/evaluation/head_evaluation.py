"""Evaluation of a head: tokens per target step and speed, measured by the engine itself, and accuracy."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from specdec.bench.environment import environment
from specdec.bench.timed_run import EngineContender, run_rounds
from specdec.building.checkpoint_checks import check_draft
from specdec.config import EAGLE2_SHAPE, EngineConfig, default_shape
from specdec.core.device import resolve_device
from specdec.core.outputs import RequestOutput, SpeculationStats
from specdec.core.sampling_params import SamplingParams
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.engine.request_maker import RequestMaker
from specdec.kernels.types.settings import KernelChoice
from specdec.llm import LLM
from specdec.models.llama import read_llama_config
from specdec.models.tokenizer import vocabulary_digest
from specdec.train_eagle.data.chat_prompts import read_prompts
from specdec.train_eagle.data.conversations import BadData, open_source
from specdec.train_eagle.data.provenance import WEIGHTS, file_digest
from specdec.train_eagle.data.stage_settings import EvaluateSettings
from specdec.train_eagle.evaluation.accuracy import accuracy, head_of
from specdec.train_eagle.evaluation.evaluation import Evaluation, Measured

# Requests at once, and tokens of a step besides their trees.
SEATS = 32
PROMPT_TOKENS = 1 << 14


def engine(
    model: Path, head: Path, shape: DraftShape, dtype: str, max_model_len: int, kernels: KernelChoice = "auto"
) -> LLM:
    """Build an engine whose token budget has room for every row's whole tree in every step, prompts included.

    Args:
        max_model_len: tokens of the longest request, for which every seat has room in the cache.
    """
    return LLM(
        model,
        head,
        dtype=dtype,
        kernels=kernels,
        shape=shape,
        max_model_len=max_model_len,
        adaptive_drafts=False,
        max_num_seqs=SEATS,
        max_num_batched_tokens=SEATS * (1 + shape.nodes) + PROMPT_TOKENS,
    )


def answer(llm: LLM, prompts: Sequence[list[int]], temperature: float, max_tokens: int) -> list[RequestOutput]:
    """Answer prompts with seeds 0, 1, …"""
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens) for i in range(len(prompts))]
    return llm.generate(list(prompts), params, use_tqdm=False)


def measure_speed(
    drafting: LLM, plain: LLM, prompts: Sequence[list[int]], temperature: float, max_tokens: int
) -> tuple[float, float]:
    """Return tokens per second with a head and without one, of single requests that both engines answer in turn.

    Args:
        prompts: token ids, at least one prompt, whose first is answered once more before, which is not counted.
    """
    params = SamplingParams(temperature=temperature, seed=0, max_tokens=max_tokens)
    engines = {"drafting": EngineContender(drafting, params), "plain": EngineContender(plain, params)}
    run_rounds(engines, [prompts[:1]], rounds=0, warmup=1)
    drafted, undrafted = run_rounds(engines, [[prompt] for prompt in prompts], rounds=1, warmup=0).values()
    return drafted[0].tok_per_s, undrafted[0].tok_per_s


def accepted_shares(stats: SpeculationStats) -> list[float]:
    """Return the share of steps that accept a draft token of depth 1, 2, …"""
    return [round(count / max(1, stats.steps), 4) for count in stats.accepted_per_depth]


def evaluate(
    model: Path,
    draft: Path,
    domains: Mapping[str, str | Path],
    given: EvaluateSettings,
    bad: BadData,
    shape: DraftShape | None,
) -> Evaluation:
    """Measure a head.

    Args:
        domains: files or data sets of conversations, by a name for each.
        bad: counts the entries that are left out.
        shape: bounds of draft trees; None for those of `specdec generate` on this device, and besides them EAGLE-2's.

    Raises:
        ValueError: a temperature, a source, the target or the head is unusable.
    """
    temperatures, max_tokens, dtype = given.temperatures, given.max_tokens, given.dtype
    for temperature in temperatures:
        SamplingParams(temperature=temperature, max_tokens=max_tokens)
    sources = {name: open_source(source) for name, source in domains.items()}
    serving = shape or default_shape(resolve_device("auto").type)
    others = [EAGLE2_SHAPE] if shape is None and serving != EAGLE2_SHAPE else []
    sizes = read_llama_config(model)
    check_draft(draft, model, sizes)
    maker = RequestMaker.read(EngineConfig(model=model), sizes)
    if maker.tokenizer is None or not maker.tokenizer.has_chat_template:
        raise ValueError(f"{model}: no chat template; add a chat_template.jinja to the folder")
    prompts = {name: read_prompts(maker, source, given.limit, max_tokens, bad) for name, source in sources.items()}
    # Bounds the caches, so that on a GPU an engine leaves room for another.
    longest = max(len(prompt) for asked in prompts.values() for prompt in asked) + max_tokens
    cases = [(name, temperature) for name in prompts for temperature in dict.fromkeys(temperatures)]
    speeds = {}
    if given.speed_prompts:
        # As generate builds them: with any kernels, and trees that adapt.
        drafting = LLM(model, draft, dtype=dtype, shape=serving, max_model_len=longest)
        with drafting, LLM(model, None, dtype=dtype, max_model_len=longest) as plain:
            head_of(drafting)
            for name, temperature in cases:
                timed = prompts[name][: given.speed_prompts]
                speeds[name, temperature] = measure_speed(drafting, plain, timed, temperature, max_tokens)
    # Accuracy runs the layers with an attention of its own, which layers in one call do not take.
    with engine(model, draft, serving, dtype, longest, "auto" if torch.cuda.is_available() else "torch") as llm:
        head_of(llm)
        dtype = llm.config.dtype
        # Accuracy is measured on greedy answers, which are always made.
        answers = {
            (name, temperature): answer(llm, asked, temperature, max_tokens)
            for name, asked in prompts.items()
            for temperature in dict.fromkeys((*temperatures, 0.0))
        }
        accuracies = {name: accuracy(llm, answers[name, 0.0], serving.depth) for name in prompts}
    rows = {case: [_measured(*case, serving, answers[case], speeds.get(case, ()))] for case in cases}
    for other in others:
        with engine(model, draft, other, dtype, longest) as llm:
            for (name, temperature), found in rows.items():
                outputs = answer(llm, prompts[name], temperature, max_tokens)
                found.append(_measured(name, temperature, other, outputs))
    facts = environment()
    machine = facts["gpu"] or f"{facts['processor']}, {facts['threads']} threads"
    made_of = vocabulary_digest(model), file_digest(draft, WEIGHTS)
    measured = [row for found in rows.values() for row in found]
    return Evaluation(str(model), str(draft), dtype, max_tokens, measured, accuracies, machine, *made_of)


def _measured(
    name: str, temperature: float, shape: DraftShape, outputs: Sequence[RequestOutput], speeds: Iterable[float] = ()
) -> Measured:
    found = SpeculationStats.total(output.stats for output in outputs)
    shares = accepted_shares(found)
    shares += [0.0] * (shape.depth - len(shares))
    counts = found.tokens, found.steps
    rates = (round(speed, 3) for speed in speeds)
    return Measured(name, temperature, shape, len(outputs), round(found.tau, 4), shares, *counts, *rates)
