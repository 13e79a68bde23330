"""Choice of the draft where the user names none, and the line that tells it."""

import json
import shutil
from pathlib import Path

import pytest

from specdec import LLM, AsyncLLM
from specdec.building.named_checkpoints import HEADS
from specdec.building.resolved_config import resolved_config
from specdec.cli.app import main
from specdec.config import DEMO_HEAD
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from tests.fakes import edit_json
from tests.specdec.tiny_checkpoints import Tiny


@pytest.fixture
def named(tiny: Tiny, tmp_path: Path) -> Path:
    """A folder with the target, which may name the head beside it."""
    shutil.copytree(tiny.target, tmp_path / "target")
    shutil.copytree(tiny.head, tmp_path / "head")
    return tmp_path / "target"


def name_head(target: Path, where: str, name: str) -> None:
    if where == "config":
        edit_json(target / "config.json", draft_head=name)
    else:
        (target / "README.md").write_text(f"---\nlicense: mit\ndraft_head: {name}\n---\n# Target\n")


@pytest.mark.parametrize("where", ["config", "card"])
@pytest.mark.parametrize("spelled", ["../head", "{head}"])
def test_the_head_that_the_model_names_drafts(named: Path, where: str, spelled: str) -> None:
    head = named.parent / "head"
    name_head(named, where, spelled.format(head=head))
    config = LLM(named, dtype="float64", device="cpu").config
    assert (config.model, config.draft, config.chains) == (named, head, ())


def test_without_a_head_n_grams_draft(named: Path) -> None:
    (named / "README.md").write_text("# Target\n")
    llm = LLM(named, dtype="float64", device="cpu")
    assert (llm.config.draft, llm.config.chains) == (None, ("ngram",))
    assert AsyncLLM(named).config.sources == "ngram"
    # A card that is no YAML names no head either.
    (named / "README.md").write_text("---\nhead: [\n---\n# Target\n")
    assert resolved_config(named, "auto", {}).sources == "ngram"


def test_a_head_given_as_the_model_drafts_for_its_target(named: Path) -> None:
    head = named.parent / "head"
    layer = json.loads((head / "config.json").read_text())
    target = {"speculators_model_type": "eagle", "speculators_config": {"verifier": {"name_or_path": "../target"}}}
    edit_json(head / "config.json", transformer_layer_config=layer, **target)
    config = LLM(head, dtype="float64", device="cpu").config
    assert (config.model, config.draft) == (named, head)


def test_the_demo_has_its_own_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "specdec")
    config = resolved_config(None, "auto", {})
    assert (config.draft, config.chains) == (DEMO_HEAD, ())
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", r"target: its head nowhere: no such folder"),
        ("org/head", r"target: its head org/head: no such folder, not in the hub's cache"),
        (["a"], r"target: its head \['a'\] must be a path, or org/name on the hub"),
    ],
)
def test_a_head_that_cannot_be_had_is_told(named: Path, name: object, message: str) -> None:
    edit_json(named / "config.json", draft_head=name)
    with pytest.raises(CheckpointError, match=message):
        resolved_config(named, "auto", {})
    assert resolved_config(named, None, {}).sources is None


@pytest.mark.long
def test_the_command_chooses_as_python_does_and_says_so(
    named: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in ("SPECDEC_MODEL", "SPECDEC_DRAFT", "SPECDEC_LOG_LEVEL"):
        monkeypatch.delenv(variable, raising=False)

    fast = ["--max-tokens", "4", "--dtype", "float64", "--json", "--fixed-drafts", "--prefill-stretch", "0"]

    def said(*options: str) -> str:
        with pytest.raises(SystemExit) as exited:
            main(["generate", "hi", *fast, *options])
        captured = capsys.readouterr()
        assert exited.value.code == 0
        assert len(json.loads(captured.out)["token_ids"]) >= 1
        return captured.err

    model = ("--model", str(named))
    assert said(*model) == (
        f"specdec: INFO: drafts: ngram (prompt lookup), since {named} names no head, and none in {HEADS} is for it; "
        "--draft takes one, or none\n"
    )
    name_head(named, "card", "../head")
    assert said(*model) == f"specdec: INFO: drafts: {named.parent / 'head'}, the head that {named} names\n"
    # Nothing is said of what the user chose.
    assert said(*model, "--draft", "none") == said(*model, "--draft", "ngram") == ""
