"""Thinking before a grammar, on the known output and on paths of drafts: as its definition says, under every rule."""

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.draft_heads.drafting.chains import ChainRates
from specdec.draft_heads.drafting.structured_drafts import ForcedText, pruned
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.types.tree import DraftTree
from specdec.verify.sampling import Context, Sampling
from specdec.verify.thinking_state import ThinkingMarks, ThinkingState
from specdec.verify.verifier import RULES
from tests.kernel_sets import REFERENCES, TORCH
from tests.profiles import num_cases
from tests.specdec.structured.small_grammars import END, GRAMMARS, PROMPT, VOCAB, allowed_after, encode, state_of
from tests.strategies import draft_trees, seeds
from tests.verify.sampled_rows import SampledRow, verify

# Tokens without text, and one of a turn.
START, STOP, CALL, TURN = 10, 11, 12, 13
MARKS = ThinkingMarks(START, STOP, frozenset([CALL]), frozenset([TURN]))
ALL = set(range(VOCAB))


class Case:
    """A request that thinks, and which tokens may follow its output by definition."""

    def __init__(self, grammar: str | None, budget: int | None, is_open: bool) -> None:
        self.grammar, self.budget, self.is_open = grammar, budget, is_open

    def state(self) -> ThinkingState:
        answer = None if self.grammar is None else state_of(self.grammar)
        return ThinkingState(MARKS, len(PROMPT), VOCAB, is_open=self.is_open, budget=self.budget, grammar=answer)

    def allowed(self, output: Sequence[int]) -> set[int]:
        """Tokens that may follow an output, none after one that is itself forbidden."""
        thought = list[int]()
        ends = {STOP} if self.grammar is not None else {STOP, CALL}
        for place, token in enumerate(output):
            if token not in self._thinking(thought):
                return set()
            if token in ends:
                return ALL if self.grammar is None else allowed_after(self.grammar, output[place + 1 :])
            thought.append(token)
        return self._thinking(thought)

    def _thinking(self, thought: Sequence[int]) -> set[int]:
        if self.budget is None:
            return ALL
        if not thought and not self.is_open:
            return ALL if self.budget else {START}
        return ALL if len(thought) - (thought[:1] == [START]) < self.budget else {STOP}

    def random_output(self, seed: int, most: int) -> list[int]:
        """An output that is allowed, in which marks are as frequent as text."""
        generator, found = random.Random(seed), list[int]()
        while len(found) < most and (allowed := self.allowed(found) - {END}):
            marks = sorted(allowed & {START, STOP, CALL})
            found.append(generator.choice(marks if marks and generator.random() < 0.4 else sorted(allowed)))
        return found


cases = st.builds(Case, st.none() | st.sampled_from(GRAMMARS), st.none() | st.integers(0, 5), st.booleans())
trees = draft_trees(12, STOP + 2)


def bits(mask: Sequence[int]) -> set[int]:
    return {token for token in range(VOCAB) if mask[token // 8] >> token % 8 & 1}


@given(case=cases, seed=seeds, size=st.integers(0, 9), tree=trees)
def test_masks_are_those_of_the_definition_at_every_node(case: Case, seed: int, size: int, tree: DraftTree) -> None:
    """Also after output was added that other drafts were asked about before."""
    state, output = case.state(), case.random_output(seed, size)
    paths = [[token for token in path if token >= 0] for path in tree.path_tokens]
    for known in range(len(output) + 1):
        token_ids = [*PROMPT, *output[:known]]
        masks = state.masks(token_ids, paths)
        wanted = [case.allowed([*output[:known], *path]) for path in paths]
        if all(allowed == ALL for allowed in wanted):
            # Free thinking costs nothing.
            assert masks is None
        for place, (path, expected) in enumerate(zip(paths, wanted, strict=True)):
            assert state.allows(token_ids, path) == bool(expected)
            found = ALL if masks is None else bits(masks[place].tolist())
            assert not expected or found == expected
    is_complete = state.is_complete([*PROMPT, *output])
    assert is_complete == (case.grammar is not None and STOP in output and END in case.allowed(output))


@given(case=cases, seed=seeds, size=st.integers(0, 9), most=st.integers(1, 6))
def test_what_is_forced_is_drafted(case: Case, seed: int, size: int, most: int) -> None:
    output = case.random_output(seed, size)
    chains = ForcedText(case.state(), ChainRates(), encode).chains([*PROMPT, *output], most)
    chain = list(chains[0].tokens) if chains else []
    assert len(chain) <= most
    assert not chain or case.allowed([*output, *chain])
    allowed = case.allowed(output)
    assert len(allowed) != 1 or chain[0] in allowed


@pytest.mark.long
@settings(max_examples=num_cases(60))
@given(
    case=cases,
    seed=seeds,
    size=st.integers(0, 9),
    tree=trees,
    rule=st.sampled_from(["coupled", "rejection"]),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    kernels=st.sampled_from([TORCH, REFERENCES]),
)
def test_no_rule_lets_a_forbidden_token_through(
    case: Case, seed: int, size: int, tree: DraftTree, rule: str, temperature: float, kernels: KernelSet
) -> None:
    """Whatever is drafted, forbidden drafts included. Marks are likely."""
    output = case.random_output(seed, size)
    context = Context(Sampling(temperature=temperature, seed=seed, grammar=case.state()), [*PROMPT, *output], 2)
    generator = torch.Generator().manual_seed(seed)
    if rule == "rejection" and seed % 2:
        q = torch.softmax(torch.randn(1 + len(tree), VOCAB, generator=generator), -1)
        tree = DraftTree(tree.tokens, tree.parents, q)
    logits = 4 * torch.randn(1 + len(tree), VOCAB, generator=generator, dtype=torch.float64)
    logits[:, [START, STOP, CALL]] += 3
    drafts = [tree, pruned(tree, context)] if tree.draft_probs is None else [tree]
    for draft in drafts:
        row = SampledRow(draft, context)
        (found,) = verify(RULES[rule].make(kernels), [row], logits[: 1 + len(draft)])  # type: ignore[arg-type]
        tokens = [*output, *(draft.tokens[node] for node in found.path), found.next_token]
        assert all(token in case.allowed(tokens[:place]) for place, token in enumerate(tokens))


@pytest.mark.parametrize(
    ("prompt", "last"),
    [
        ([1, 2], None),
        ([1, START, 2], START),
        ([START, 1, STOP, 2], STOP),
        ([START, 1, STOP, 2, TURN, 3], None),
        ([START, 1, STOP, 2, TURN, 3, START], START),
        ([TURN, START, STOP], STOP),
        ([], None),
    ],
)
def test_the_last_turn_of_a_prompt_shows_whether_it_thinks(prompt: list[int], last: int | None) -> None:
    """The thinking of earlier turns says nothing of the next."""
    assert MARKS.last(prompt) == last


@pytest.mark.parametrize(
    ("output", "count"), [([], 0), ([START], 0), ([START, 1, 2, STOP, 3], 2), ([1, 2], 2), ([1, CALL, STOP], 1)]
)
def test_tokens_of_thinking_are_counted_without_marks(output: list[int], count: int) -> None:
    assert MARKS.num_thinking(output, has_form=False) == count
    # A call's tag is a tag of a call, and an answer with a form begins behind the end mark.
    place = output.index(STOP) if STOP in output else len(output)
    assert MARKS.num_thinking(output, has_form=True) == place - (output[:1] == [START])
    assert MARKS.answer_place(output, has_form=True) == min(place + 1, len(output))
    calls = output.index(CALL) if CALL in output else len(output)
    assert MARKS.answer_place(output, has_form=False) == min(place + 1, calls, len(output))
