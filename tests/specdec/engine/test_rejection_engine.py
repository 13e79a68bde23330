"""The whole engine under each acceptance rule: its output follows the target's law, whatever was drafted."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from specdec import LLM, DraftShape, SamplingParams
from specdec.draft_heads.drafting.tree_drafter import TreeDrafter
from specdec.kernels.reference.noise import gumbel, uniforms
from specdec.kernels.reference.sampling import HostSampling
from specdec.kernels.types.types import NoiseKey, Stream
from tests.fakes import save_random_block, save_random_head, save_random_llama
from tests.profiles import IS_NIGHTLY, by_day
from tests.shared_results import shared
from tests.verify.chi_square import chi_square_tail

pytestmark = pytest.mark.slow

VOCAB = 6
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
PROMPT = [3, 4]
TREE, CHAIN = DraftShape(3, 3, 9), DraftShape(3, 1, 3)
# Requests of a run; so many show a token whose chance is raised by this factor.
DRAWS, RAISED = (20_000, 1.2) if IS_NIGHTLY else (4_000, 1.4)
# The first token comes with the prompt and is never drafted: the first three tokens together, the three after it,
# and each of those alone, where a small bias shows best.
WINDOWS = {"first": slice(0, 3), "drafted": slice(1, 4), "2nd": slice(1, 2), "3rd": slice(2, 3), "4th": slice(3, 4)}
windows = pytest.mark.parametrize("window", WINDOWS.values(), ids=list(WINDOWS))
RUNS = {
    "plain": ("rejection", None, TREE),
    "rejection": ("rejection", "head", TREE),
    "chain": ("rejection", "head", CHAIN),
    "coupled": ("coupled", "gated,ngram", TREE),
}
# The 0.1 % point for all cases together (Bonferroni): each run against the law, and two against plain decoding.
LEAST = 0.001 / (len(WINDOWS) * (len(RUNS) + 2))


class World(NamedTuple):
    """Folder of checkpoints, and the law of the first four tokens after `PROMPT`, `[vocab] * 4`."""

    folder: Path
    law: Tensor


class Sample(NamedTuple):
    """int64 `[draws, 4]` first tokens of many requests; tokens a step, and nodes drafted a step."""

    tokens: Tensor
    tau: float
    drafted: float


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A target whose distributions are neither flat nor peaked, and two heads that know nothing of them."""
    folder = tmp_path_factory.mktemp("rejection")
    target = save_random_llama(folder / "target", **{**SMALL, "initializer_range": 0.25})
    save_random_head(folder / "head", **SMALL)
    save_random_block(folder / "gated", "gated", taps=(0, 1), **SMALL)
    law = torch.ones((), dtype=torch.float64)
    with torch.inference_mode():
        for length in range(4):
            prompts = [[*PROMPT, *path] for path in product(range(VOCAB), repeat=length)]
            p = target(torch.tensor(prompts)).logits[:, -1].softmax(-1)
            law = law[..., None] * p.view([VOCAB] * (length + 1))
    return World(folder, law)


def engine(world: World, verify: str, draft: str | None, shape: DraftShape) -> LLM:
    sources = [name if name == "ngram" else str(world.folder / name) for name in (draft or "none").split(",")]
    return LLM(
        world.folder / "target",
        ",".join(sources) if draft else None,
        dtype="float64",
        shape=shape,
        verify=verify,
        adaptive_drafts=False,
        max_num_seqs=128,
        max_model_len=48,
        enable_prefix_caching=False,
    )


def draw_sample(world: World, name: str) -> Sample:
    """Generate with the settings of a run. Every run has seeds of its own: samples are compared as independent ones."""
    number = list(RUNS).index(name)
    params = [
        SamplingParams(temperature=1.0, seed=number * DRAWS + i, max_tokens=5, ignore_eos=True) for i in range(DRAWS)
    ]
    outputs = engine(world, *RUNS[name]).generate([PROMPT] * DRAWS, params, use_tqdm=False)
    stats = [output.stats for output in outputs]
    steps = sum(one.steps for one in stats)
    return Sample(
        torch.tensor([output.token_ids[:4] for output in outputs]),
        sum(one.tokens for one in stats) / steps,
        sum(one.drafted for one in stats) / steps,
    )


@pytest.fixture(scope="module")
def sample_of(world: World, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Sample]:
    """Return the sample of a run, drawn once by all test processes together."""

    @cache
    def sample(name: str) -> Sample:
        return Sample(*shared(tmp_path_factory, f"sample of {name}", lambda: tuple(draw_sample(world, name))))

    return sample


def law_in(law: Tensor, window: slice) -> Tensor:
    """`[vocab**n]` chance of each sequence of the window's n tokens."""
    return law.sum([place for place in range(4) if place not in range(4)[window]]).flatten()


def counts(tokens: Tensor, window: slice) -> Tensor:
    """`[vocab**n]`: how often each sequence of the window's n tokens occurs."""
    part = tokens[:, window]
    places = VOCAB ** torch.arange(part.shape[1]).flip(0)
    return torch.bincount((part * places).sum(1), minlength=VOCAB ** part.shape[1]).double()


def two_sample_tail(one: Tensor, other: Tensor) -> float:
    """Chance of counts at least as different, if both samples, of equal size, have one law; small cells are pooled."""
    small = one + other < 10
    one, other = (torch.cat([part[~small], part[small].sum()[None]]) for part in (one, other))
    both = one + other
    statistic = ((one - other)[both > 0] ** 2 / both[both > 0]).sum()
    degrees = torch.tensor((int((both > 0).sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, statistic / 2))


@pytest.mark.long
@windows
@pytest.mark.parametrize("name", by_day(list(RUNS), 3))
def test_output_follows_the_dense_models_law(
    world: World, sample_of: Callable[[str], Sample], name: str, window: slice
) -> None:
    expected = DRAWS * law_in(world.law, window)
    assert chi_square_tail(counts(sample_of(name).tokens, window), expected) > LEAST


@pytest.mark.long
@windows
@pytest.mark.parametrize("name", ["rejection", "chain"])
def test_output_is_distributed_as_without_speculation(
    sample_of: Callable[[str], Sample], name: str, window: slice
) -> None:
    found, plain = (counts(sample_of(one).tokens, window) for one in (name, "plain"))
    assert two_sample_tail(found, plain) > LEAST


@pytest.mark.parametrize("name", by_day(["rejection", "chain", "coupled"], 2))
def test_drafts_were_accepted_and_rejected(sample_of: Callable[[str], Sample], name: str) -> None:
    """Else the laws above would say nothing about the rules."""
    # max_tokens leaves room for 4 tokens a step at most.
    assert 1.2 < sample_of(name).tau < 2.5


def test_trees_have_more_drafts_than_chains_and_plain_steps_none(sample_of: Callable[[str], Sample]) -> None:
    assert (sample_of("plain").tau, sample_of("plain").drafted) == (1, 0)
    assert sample_of("rejection").drafted > 2 * sample_of("chain").drafted > 2


def test_the_tests_see_a_bias(world: World) -> None:
    """The likeliest third token has its chance raised."""
    law = law_in(world.law, WINDOWS["3rd"])
    off = law.clone()
    off[law.argmax()] *= RAISED
    off /= off.sum()
    for tail in (chi_square_tail, two_sample_tail):
        assert tail(DRAWS * law, DRAWS * law) == 1
        assert tail(DRAWS * off, DRAWS * law) < LEAST
    # 50 and 30 of 80, once against fair halves and once against 40 and 40 found.
    assert chi_square_tail(torch.tensor([50.0, 30.0]), torch.tensor([40.0, 40.0])) == pytest.approx(0.0253, abs=1e-4)
    assert two_sample_tail(torch.tensor([50.0, 30.0]), torch.tensor([40.0, 40.0])) == pytest.approx(0.1103, abs=1e-3)


def requests(temperatures: Sequence[float]) -> tuple[list[list[int]], list[SamplingParams]]:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, VOCAB, (1 + 2 * i,), generator=generator).tolist() for i in range(8)]
    params = [
        SamplingParams(temperature=temperatures[i % len(temperatures)], seed=i, max_tokens=24, ignore_eos=True)
        for i in range(8)
    ]
    return prompts, params


DRAFTS = [("head", TREE), ("head", CHAIN), ("gated", TREE), ("gated", CHAIN)]
drafts = pytest.mark.parametrize(("draft", "shape"), DRAFTS)


@pytest.mark.parametrize(("draft", "shape"), [*DRAFTS, ("gated,ngram", TREE)])
def test_at_temperature_zero_it_is_plain_decoding(world: World, draft: str, shape: DraftShape) -> None:
    prompts, params = requests([0.0])
    plain = engine(world, "coupled", None, TREE).generate(prompts, params, use_tqdm=False)
    found = engine(world, "rejection", draft, shape).generate(prompts, params, use_tqdm=False)
    assert [output.token_ids for output in found] == [output.token_ids for output in plain]
    assert sum(output.stats.drafted for output in found) > 0


@pytest.mark.long
@drafts
def test_alone_and_in_a_batch_of_eight(world: World, draft: str, shape: DraftShape) -> None:
    """Trees, coins and draws are keyed by request, so the same tokens and the same drafts are accepted."""
    prompts, params = requests([1.0, 0.7, 0.0, 1.5])
    llm = engine(world, "rejection", draft, shape)
    together = llm.generate(prompts, params, use_tqdm=False)
    alone = [llm.generate([prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]
    for one, other in zip(together, alone, strict=True):
        assert one.token_ids == other.token_ids
        assert one.stats == other.stats
    assert sum(output.stats.accepted_per_step for output in together) > 0


@drafts
def test_no_draw_shares_its_noise_with_another(
    world: World, monkeypatch: pytest.MonkeyPatch, draft: str, shape: DraftShape
) -> None:
    """Neither drafts of two steps for one position nor a draft and the draw after its rejection: too small a bias
    for the tests above.
    """
    llm = engine(world, "rejection", draft, shape)
    assert isinstance(llm.engine.worker.drafter, TreeDrafter)
    asked: list[tuple[int, Stream, int]] = []

    def drafting(key: NoiseKey, size: int, stream: Stream = Stream.TARGET, lane: int = 0) -> Tensor:
        # All nodes of a level ask for the same, one after the other.
        if asked[-1:] != [(key.position, stream, lane)]:
            asked.append((key.position, stream, lane))
        return gumbel(*key, size, stream, lane)

    def drawing(seed: int, index: int, position: int, count: int, stream: Stream = Stream.COIN) -> list[float]:
        if stream != Stream.COIN:
            asked.append((position, stream, 0))
        return uniforms(seed, index, position, count, stream)

    sampling = llm.engine.worker.drafter.kernels.search.perturbed_top_k.__self__  # type: ignore[attr-defined]
    assert isinstance(sampling, HostSampling)
    monkeypatch.setattr(sampling.noise, "at", drafting)
    monkeypatch.setattr("specdec.verify.chance.uniforms", drawing)
    output = llm.generate([PROMPT], SamplingParams(temperature=1.0, seed=1, max_tokens=24, ignore_eos=True))[0]
    assert 0 < sum(output.outputs[0].accepted) < 20
    assert {stream for _, stream, _ in asked} == {Stream.DRAFT, Stream.RESIDUAL}
    assert len(set(asked)) == len(asked)
