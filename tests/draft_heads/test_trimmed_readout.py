"""A readout of frequent tokens, and the token maps that name them."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specdec.draft_heads.heads.readout import MatrixReadout, read_token_map, trimmed_readout
from specdec.kernels.reference.projection import Projection

VOCAB = 30
OWN = torch.tensor([25, 3, 8, 9, 20, 1, 14])


def whole(tokens: Tensor | None = None) -> MatrixReadout:
    weight = torch.randn(VOCAB if tokens is None else len(tokens), 4, generator=torch.Generator().manual_seed(0))
    return MatrixReadout(Projection(weight), VOCAB, tokens)


def kept(before: MatrixReadout, after: MatrixReadout) -> list[int]:
    """The tokens of what was trimmed, whose logits are those they had."""
    hidden = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    assert after.tokens is not None
    found = after(hidden).full()
    assert torch.equal(found[0].isfinite().nonzero().flatten(), after.tokens.sort().values)
    torch.testing.assert_close(found[:, after.tokens], before(hidden).full()[:, after.tokens])
    return after.tokens.tolist()


@pytest.mark.parametrize(
    ("number", "always", "expected"),
    [(1, (), [0]), (5, (2, 29), [0, 1, 2, 3, 4, 29]), (30, (), list(range(30))), (2, (29, 30, 500), [0, 1, 29])],
)
def test_the_lowest_ids_and_those_that_stay(number: int, always: tuple[int, ...], expected: list[int]) -> None:
    assert kept(whole(), trimmed_readout(whole(), number, always)) == expected


def test_a_head_with_a_vocabulary_of_its_own_is_trimmed_further() -> None:
    assert kept(whole(OWN), trimmed_readout(whole(OWN), 3, {1, 2})) == [25, 3, 8, 1]


@pytest.mark.parametrize("form", ["json", "list", "tensor"])
def test_a_token_map_names_them(tmp_path: Path, form: str) -> None:
    """The map is in SGLang's form, a list or tensor saved by torch, or in JSON."""
    ids = [20, 3, 5, 29]
    file = tmp_path / ("map.json" if form == "json" else "freq_4.pt")
    if form == "json":
        file.write_text(json.dumps(ids))
    else:
        torch.save(ids if form == "list" else torch.tensor(ids), file)
    assert sorted(read_token_map(file, VOCAB)) == sorted(ids)
    assert kept(whole(), trimmed_readout(whole(), file, {1})) == [1, 3, 5, 20, 29]
    assert kept(whole(OWN), trimmed_readout(whole(OWN), file, {1})) == [3, 20, 1]


@pytest.mark.parametrize("number", [-1, 0, 31])
def test_more_than_there_are_or_none_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match=f"draft_vocab is {number}; it must be from 1 to 30, as many as are scored"):
        trimmed_readout(whole(), number)


def test_more_than_a_head_scores_is_refused() -> None:
    with pytest.raises(ValueError, match="draft_vocab is 8; it must be from 1 to 7"):
        trimmed_readout(whole(OWN), 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"draft_vocab '.*map\.json' is neither a number nor a file; say how many tokens, or which"),
        ("{", r"map\.json: not a token map: "),
        ("[]", "it must be a list of token ids below 30"),
        ("[1, 30]", "it must be a list of token ids below 30"),
        ("[true]", "it must be a list of token ids below 30"),
        ('{"a": 1}', "it must be a list of token ids below 30"),
        ("[2]", r"draft_vocab .*map\.json names none of the 7 tokens that can be drafted"),
    ],
)
def test_an_unusable_token_map_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "map.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=message) as raised:
        trimmed_readout(whole(OWN), file)
    assert "\n" not in str(raised.value)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "map.pt")
    torch.save(torch.tensor([1.5]), tmp_path / "floats.pt")
    (tmp_path / "text.pt").write_text("hello")
    for name in ("map.pt", "floats.pt", "text.pt"):
        with pytest.raises(ValueError, match=f"{name}: not a token map: ") as raised:
            read_token_map(tmp_path / name, VOCAB)
        assert "\n" not in str(raised.value)
