"""The engine with several draft sources: what each is used for, and that none is seen in the output."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from specdec import LLM, DraftShape, SamplingParams, Speculation
from tests.profiles import by_day
from tests.specdec.drawn_requests import edited
from tests.specdec.world import BLOCKS, World

PROMPT = list(range(5, 15))
SHAPE = DraftShape(3, 2, 6)
LETTERS = [5, 6, 7]


def load(world: World, draft: str | None, **settings: Any) -> LLM:
    folders = {"head", *BLOCKS}
    sources = ",".join(str(world.folder / name) if name in folders else name for name in (draft or "none").split(","))
    return LLM(world.folder / "target", sources, **{"dtype": "float64", "shape": SHAPE, **settings})


@pytest.mark.long
@pytest.mark.parametrize(
    ("draft", "adaptive"),
    by_day(
        [
            ("head,ngram", False),
            (None, True),
            ("dspark,ngram", True),
            ("ngram", False),
            (None, False),
            ("head", False),
            ("dspark,ngram", False),
            ("head,ngram", True),
        ],
        4,
    ),
)
def test_a_prediction_saves_steps_with_any_draft(world: World, draft: str | None, adaptive: bool) -> None:
    llm = load(world, draft, adaptive_drafts=adaptive)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=3, max_tokens=60, ignore_eos=True)
        (plain,) = llm.generate([PROMPT], replace(params, speculation=Speculation(enabled=False)))
        assert plain.stats.steps == 59
        (right,) = llm.generate([PROMPT], replace(params, prediction=plain.token_ids))
        (edit,) = llm.generate([PROMPT], replace(params, prediction=edited(plain.token_ids, 1)))
        (wrong,) = llm.generate([PROMPT], replace(params, prediction=[96] * 60))
        assert right.token_ids == edit.token_ids == wrong.token_ids == plain.token_ids
        assert (right.stats.accepted_prediction, right.stats.rejected_prediction) == (60, 0)
        assert edit.stats.accepted_prediction > edit.stats.rejected_prediction > 0
        if not adaptive:
            assert right.stats.steps <= 20
            assert edit.stats.steps <= 45


def test_a_request_bounds_its_chains_too(world: World) -> None:
    llm = load(world, "ngram", adaptive_drafts=False)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (plain,) = llm.generate([PROMPT], params)
    for bounds in (Speculation(max_nodes=2), Speculation(max_depth=2), Speculation(enabled=False)):
        own = replace(params, prediction=plain.token_ids, speculation=bounds)
        (output,) = llm.generate([PROMPT], own)
        assert output.token_ids == plain.token_ids
        depth = len(output.stats.accepted_per_depth)
        assert depth == (2 if bounds.enabled else 0)
        # What came true is counted all the same.
        assert output.stats.accepted_prediction == 40


@pytest.mark.long
def test_chains_are_as_long_as_trees_have_nodes(world: World) -> None:
    """A level of a chain costs no pass of the head."""
    llm = load(world, "head", adaptive_drafts=False)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    (plain,) = llm.generate([PROMPT], params)
    (output,) = llm.generate([PROMPT], replace(params, prediction=plain.token_ids))
    assert len(output.stats.accepted_per_depth) == SHAPE.nodes > SHAPE.depth


@pytest.mark.long
def test_the_values_of_ranks_are_learnt_from_the_models_nodes_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Fixed trees, so that head and prediction draft together; costs are measured for prompts.
    llm = load(world, "head", adaptive_drafts=False)
    learn, outcomes = llm.engine.scheduler.learn, []
    monkeypatch.setattr(llm.engine.scheduler, "learn", lambda step, own: (outcomes.extend(own), learn(step, own)))
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    (plain,) = llm.generate([PROMPT], replace(params, speculation=Speculation(enabled=False)))
    (output,) = llm.generate([PROMPT], replace(params, prediction=edited(plain.token_ids, 2)))
    assert all(rank < outcome.nodes for outcome in outcomes for rank in outcome.ranks)
    assert 0 < sum(outcome.nodes for outcome in outcomes) < output.stats.drafted
    assert sum(len(outcome.ranks) for outcome in outcomes) < sum(output.stats.accepted_per_depth)


@pytest.mark.long
@pytest.mark.parametrize(
    ("draft", "temperature"),
    [("head", 1.0), ("dflash", 0.7), ("dspark", 0.7), ("domino", 1.4), ("dflash2", 1.4)],
)
def test_the_law_of_rejection_sampling_is_the_targets(world: World, draft: str, temperature: float) -> None:
    """Steps with drawn trees and steps with chains, in the same requests; every sequence is counted."""
    count, size = 400, 3
    llm = load(world, f"{draft},ngram", verify="rejection", adaptive_drafts=False, max_num_seqs=32, dtype="float32")
    params = SamplingParams(
        n=count,
        seed=7,
        temperature=temperature,
        max_tokens=size,
        ignore_eos=True,
        allowed_token_ids=LETTERS,
        prediction=[5, 6, 6, 7],
    )
    (output,) = llm.generate([PROMPT], params)
    found = [tuple(one.token_ids) for one in output.outputs]
    statistic = 0.0
    for sequence in product(LETTERS, repeat=size):
        chance = 1.0
        for end in range(size):
            logits = world.logits([*PROMPT, *sequence[:end]])[LETTERS]
            chance *= float(torch.softmax(logits / temperature, -1)[LETTERS.index(sequence[end])])
        statistic += (found.count(sequence) - count * chance) ** 2 / (count * chance)
    freedom = len(LETTERS) ** size - 1
    # Five standard deviations.
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5
    assert llm.stats().drafts_accepted > count / 5


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ("ngram,ngram", "draft is 'ngram,ngram'; it may name one head or small model, and ngram"),
        ("ngram,suffix", "draft is 'ngram,suffix'; it may name one head or small model, and ngram or suffix"),
        ("eagle,head", "draft is 'eagle,head'; it may name one head or small model, and ngram"),
        ("none,ngram", "draft is 'none,ngram'; it must be none alone, or sources separated by one comma"),
        ("ngram,", "draft is 'ngram,'; it must be none alone, or sources separated by one comma"),
    ],
)
def test_other_mixtures_are_refused_in_one_line(world: World, draft: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        LLM(world.folder / "target", draft)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"draft_revision": "v2"}, "draft_revision is 'v2', and draft is 'auto'; name a head or small model"),
        (
            {"draft": "ngram", "draft_revision": "v2"},
            "draft_revision is 'v2', and draft 'ngram' names no head or small",
        ),
        ({"draft": None, "draft_revision": "v2"}, "draft_revision is 'v2', and draft 'none' names no head or small"),
        ({"draft": "dspark", "draft_revision": "v2"}, "draft_revision is 'v2', and draft 'dspark' is the demo model's"),
        (
            {"revision": "v2"},
            "revision is 'v2', and no model is named; name it by model, or a head's by",
        ),
        ({"draft": "org/head", "revision": "v2"}, "revision is 'v2', and no model is named"),
    ],
)
def test_a_revision_of_what_has_none_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        LLM(**given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("prediction", [[97], [-1], [0.5], 3])
def test_a_prediction_of_other_tokens_is_refused(world: World, prediction: Any) -> None:
    with pytest.raises(ValueError, match="prediction"):
        load(world, None).generate([PROMPT], SamplingParams(prediction=prediction))
