"""Masks along paths of drafts: those of a fresh matcher, under every acceptance rule, with no forbidden token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.draft_heads.drafting.chains import ChainRates
from specdec.draft_heads.drafting.structured_drafts import ForcedText, pruned
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.types.tree import DraftTree
from specdec.verify import grammar_state
from specdec.verify.sampling import Context, Sampling
from specdec.verify.transforms import processed_logits
from specdec.verify.verifier import RULES
from tests.kernel_sets import REFERENCES, TORCH
from tests.profiles import num_cases
from tests.specdec.structured.small_grammars import (
    END,
    GRAMMARS,
    PROMPT,
    SPECIAL,
    TOKENS,
    VOCAB,
    allowed_after,
    compiled,
    encode,
    random_output,
    state_of,
)
from tests.strategies import draft_trees, seeds
from tests.verify.sampled_rows import SampledRow, nodes_of, verify

NAMES = [*TOKENS, *(f"<{token}>" for token in SPECIAL)]
# Its texts can be read in so many ways that a long one is more than is looked at.
AMBIGUOUS = "a\na: a a | /[ab]/ | a a a"
grammars = st.sampled_from(GRAMMARS)


@given(grammar=grammars, seed=seeds, size=st.integers(0, 4), tree=draft_trees(12, len(TOKENS) + 3))
def test_masks_are_those_of_a_fresh_matcher_in_any_order_of_calls(
    grammar: str, seed: int, size: int, tree: DraftTree
) -> None:
    """Also after output was added that other drafts were asked about before."""
    state, output = state_of(grammar), random_output(grammar, seed, size)
    paths = [[token for token in path if token >= 0] for path in tree.path_tokens]
    for known in range(len(output) + 1):
        token_ids = [*PROMPT, *output[:known]]
        for path, mask in zip(paths, state.masks(token_ids, paths), strict=True):
            expected = allowed_after(grammar, [*output[:known], *path])
            assert state.allows(token_ids, path) == bool(expected)
            found = {token for token in range(VOCAB) if mask[token // 8] >> token % 8 & 1}
            assert found == (expected or set(range(VOCAB)))
    assert state.is_complete([*PROMPT, *output]) == (END in allowed_after(grammar, output))


@given(grammar=grammars, seed=seeds, size=st.integers(0, 4), most=st.integers(0, 6))
def test_forced_tokens_are_in_the_grammar_and_single_ones_without_an_alternative(
    grammar: str, seed: int, size: int, most: int
) -> None:
    output = random_output(grammar, seed, size)
    chains = ForcedText(state_of(grammar), ChainRates(), encode).chains([*PROMPT, *output], most)
    assert len(chains) <= 1
    chain = list(chains[0].tokens) if chains else []
    assert len(chain) <= most
    assert not chain or allowed_after(grammar, [*output, *chain])
    allowed = allowed_after(grammar, output)
    assert not (len(allowed) == 1 and most) or chain[0] in allowed
    # A choice between texts, and not only between ways to cut one into tokens, forces nothing.
    if len({NAMES[token][0] for token in allowed}) > 1:
        assert chain == []


@pytest.mark.parametrize(
    ("grammar", "output", "forced"),
    [
        ('"a" ("b" | "c") "12ab"', [0], []),
        ('"a" ("b" | "c") "12ab"', [0, 1], ["12", "ab", "<end>"]),
        ('"ab" | "abc1"', [], ["ab"]),
        ('"ab" | "abc1"', [3], []),
        ('"1" | "ab"', [5], ["<end>"]),
        ('"bc" <[10]> "ab" <[11]>', [], ["bc", "<10>", "ab", "<11>", "<end>"]),
        ('<[10]> ("a" | "b") <[11]> "12"', [], ["<10>"]),
        ('<[10]> ("a" | "b") <[11]> "12"', [10, 0], ["<11>", "12", "<end>"]),
        ("<[10]> | <[11]>", [], []),
        ('"a" (<[10]> | "bc")', [0], []),
    ],
)
def test_forced_text_is_the_only_one_cut_as_the_tokenizer_cuts_it(
    grammar: str, output: list[int], forced: list[str]
) -> None:
    chains = ForcedText(state_of(grammar), ChainRates(), encode).chains([*PROMPT, *output], 9)
    found = [NAMES[token] for chain in chains for token in chain.tokens]
    # Behind the end there are end tokens alone.
    assert found == forced + ["<end>"] * (9 - len(forced) if forced[-1:] == ["<end>"] else 0)


@pytest.mark.parametrize("most", [3, 1000])
def test_a_long_literal_is_looked_into_as_far_as_is_asked(most: int) -> None:
    """Its 2,000 tokens are more than Python has frames; a mask is made for those alone that are asked for."""
    state = state_of(f'"{"12a" * 1000}"')
    (chain,) = ForcedText(state, ChainRates(), encode).chains(PROMPT, most)
    assert chain.tokens == encode("12a" * 1000)[:most]
    assert len(state._masks) <= 1 + most


@pytest.mark.long
@settings(max_examples=num_cases(60))
@given(
    grammar=grammars,
    seed=seeds,
    size=st.integers(0, 3),
    tree=draft_trees(8, len(TOKENS) + 3),
    rule=st.sampled_from(["coupled", "rejection"]),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    kernels=st.sampled_from([TORCH, REFERENCES]),
)
def test_no_rule_lets_a_forbidden_token_through(
    grammar: str, seed: int, size: int, tree: DraftTree, rule: str, temperature: float, kernels: KernelSet
) -> None:
    """Whatever is drafted, forbidden drafts included. Logits favour what the grammar forbids."""
    output = random_output(grammar, seed, size)
    sampling = Sampling(temperature=temperature, seed=seed, grammar=state_of(grammar))
    context = Context(sampling, [*PROMPT, *output], len(PROMPT))
    generator = torch.Generator().manual_seed(seed)
    if rule == "rejection" and seed % 2:
        q = torch.softmax(torch.randn(1 + len(tree), VOCAB, generator=generator), -1)
        tree = DraftTree(tree.tokens, tree.parents, q)
    logits = 4 * torch.randn(1 + len(tree), VOCAB, generator=generator, dtype=torch.float64)
    # The rejection rule takes drawn trees as they are: a forbidden draft has no chance there.
    drafts = [tree, pruned(tree, context)] if tree.draft_probs is None else [tree]
    for draft in drafts:
        row = SampledRow(draft, context)
        (found,) = verify(RULES[rule].make(kernels), [row], logits[: 1 + len(draft)])  # type: ignore[arg-type]
        tokens = [*output, *(draft.tokens[node] for node in found.path), found.next_token]
        assert all(token in allowed_after(grammar, tokens[:place]) for place, token in enumerate(tokens))


def test_drafter_and_target_see_the_same_mask() -> None:
    context = Context(Sampling(grammar=state_of(GRAMMARS[0])), [*PROMPT, 0], len(PROMPT))
    scores = processed_logits(torch.zeros(1, VOCAB), nodes_of([SampledRow(DraftTree(), context)]), TORCH)
    assert torch.isfinite(scores[0]).nonzero().flatten().tolist() == [TOKENS.index("b"), TOKENS.index("bc"), END]


def test_behind_the_end_there_are_end_tokens_alone() -> None:
    """A request that ignores end tokens goes on with them."""
    state = state_of('"a"')
    assert state.is_complete([*PROMPT, 0])
    assert state.allows([*PROMPT, 0, END], [END, END])
    assert not state.allows([*PROMPT, 0, END], [END, 0])
    assert state.is_complete([*PROMPT, 0, END, END])


@given(grammar=grammars, seed=seeds, ends=st.integers(0, 3), paths=st.lists(st.lists(st.sampled_from([END, 0, 10]))))
def test_masks_behind_the_end_are_those_of_a_fresh_state(
    grammar: str, seed: int, ends: int, paths: list[list[int]]
) -> None:
    output = random_output(grammar, seed, 20)
    output += [END] * ends if END in allowed_after(grammar, output) else []
    state = state_of(grammar)
    for known in range(len(output) + 1):
        token_ids = [*PROMPT, *output[:known]]
        for path, mask in zip(paths, state.masks(token_ids, paths) if paths else [], strict=True):
            assert state.allows(token_ids, path) == bool(allowed_after(grammar, token_ids[len(PROMPT) :] + path))
            if state.allows(token_ids, path):
                assert mask.tolist() == state_of(grammar).masks([*token_ids, *path], [[]])[0].tolist()
    assert state.error is None


def test_a_grammar_that_becomes_too_complex_leaves_no_token_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a path of drafts, too; then the state goes on with the known output."""
    monkeypatch.setattr(grammar_state, "_MOST_ITEMS", 300)
    compiled.cache_clear()
    state, most = state_of(AMBIGUOUS), 0
    while state.masks(PROMPT, [[0] * most]).any():
        most += 1
    assert most > 5
    # The path is a draft: the known output goes on, with the masks of a state without an error.
    for size in (0, 3, most - 1):
        output, path = [*PROMPT, *[0] * size], [0] * (most - size)
        for each in (state, state_of(AMBIGUOUS)):
            masks = each.masks(output, [path, [], path[:-1]])
            assert [mask.any() for mask in masks] == [False, True, True]
            assert masks[1].tolist() == state_of(AMBIGUOUS).masks(output, [[]])[0].tolist()
            assert each.is_complete(output) == (size > 0)
            assert each.error is None
    assert not state.masks([*output, 0], [[]]).any()
    assert "Too many items" in str(state.error)
    assert "\n" not in str(state.error)
    state = state_of(AMBIGUOUS)
    for size in range(most, most + 3):
        assert not state.masks([*PROMPT, *[0] * size], [[]]).any()
        assert not state.is_complete([*PROMPT, *[0] * size])
        assert state.forced([*PROMPT, *[0] * size], [], 3, encode) == []
    compiled.cache_clear()


def test_forbidden_nodes_leave_with_all_below_them() -> None:
    context = Context(Sampling(grammar=state_of('"a" | "ab" | "abc1"')), PROMPT, len(PROMPT))
    tree = DraftTree((0, 1, 1, 2, 3), (-1, -1, 0, 1, 2), torch.arange(6.0)[:, None].expand(-1, VOCAB), (0, 2, 1, 4, 3))
    kept = pruned(tree, context)
    assert (kept.tokens, kept.parents, kept.ranks) == ((0, 1), (-1, 0), (0, 1))
    assert kept.draft_probs is not None
    assert kept.draft_probs[:, 0].tolist() == [0, 1, 3]
    with pytest.raises(AssertionError, match="token 5 of the output is not in its grammar"):
        pruned(tree, context._replace(token_ids=[*PROMPT, 5]))
