"""`specdec inspect`, and targets that heads name themselves."""

import json
import re
import shutil
import string
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from specdec import LLM
from specdec.cli.app import main
from specdec.config import DEMO
from tests.block_formats import BLOCK_FORMATS
from tests.checkpoints import TARGET_HIDDEN, TARGET_LAYERS, VOCAB
from tests.command_line import Result, Run, run_command, unset_variables
from tests.fakes import edit_json, save_random_llama
from tests.head_formats import FORMATS

pytestmark = pytest.mark.slow


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    unset_variables(monkeypatch)

    def call(*args: object) -> Result:
        return run_command(capsys, "inspect", *args)

    return call


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    sizes = {"vocab_size": VOCAB, "hidden_size": TARGET_HIDDEN, "num_hidden_layers": TARGET_LAYERS}
    save_random_llama(folder, **sizes, max_position_embeddings=64)
    return folder


@pytest.fixture(scope="session")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    for name, make in FORMATS.items():
        make().write(folder / name)
    return folder


def lines(result: Result) -> dict[str, str]:
    """Facts by their labels."""
    assert (result.code, result.err) == (0, "")
    found = [re.split(r"  +", line, maxsplit=1) for line in result.out.splitlines()]
    return {label: value for label, value in (pair for pair in found if len(pair) == 2) if label != "tensor"}


def test_facts_of_a_head_and_its_target(run: Run, heads: Path, target: Path) -> None:
    result = run(heads / "specforge_eagle3", "--model", target)
    assert lines(result) == {
        "recognised": "EAGLE-3 in the layout of SpecForge and SGLang",
        "trained for": "not said",
        "target": f"{target}: fits",
        "reads": "inputs of layers [2, 4, 5] (outputs of layers, since they then are the official ones)",
        "layers": "1, hidden 24, MLP 28, 4 query and 2 key-value heads of 10",
        "rope": "theta 900, linear by 2; 64 positions",
        "tokens": "53, of which it proposes 12",
        "embedding": "the target's",
        "output": "its own",
        "weights": "8,928 in float16",
    }
    fixture = FORMATS["specforge_eagle3"]()
    shown = re.findall(r"^tensor  (\S+) +(\[.*\]) (\w+)$", result.out, re.MULTILINE)
    expected = [(name, str(list(t.shape)), str(t.dtype)[6:]) for name, t in sorted(fixture.tensors.items())]
    assert shown == expected
    assert result.out.endswith("assumed: the file has no embedding: the target's\n")


READS = {
    "official_eagle": "the target's last state, behind its final norm",
    "official_eagle3": "the official layers of a target: 2, the middle one, the last but two",
    "sglang_eagle3_deep": "[1, 2, 4, 7], inputs or outputs of layers: perhaps a target's number of layers tells",
    "speculators_eagle3": "inputs of layers [3, 4, 8], as speculators counts them",
}


@pytest.mark.parametrize("name", READS)
def test_without_a_target_what_depends_on_it_is_left_open(run: Run, heads: Path, name: str) -> None:
    facts = lines(run(heads / name))
    assert facts["target"] == "not given: whether it fits is not known"
    assert facts["reads"] == READS[name]


def test_a_guess_is_among_what_is_assumed(run: Run, heads: Path, target: Path) -> None:
    result = run(heads / "sglang_eagle3_deep", "--model", target)
    assert lines(result)["reads"] == "inputs of layers [2, 3, 5, 8], or of [1, 2, 4, 7]"
    guess = "[1, 2, 4, 7] count outputs of layers, a guess; a probe decides when the head is loaded"
    assert f"assumed: eagle_aux_hidden_state_layer_ids {guess}\n" in result.out
    assert "assumed: config.json names no layers to read: the official ones\n" in run(heads / "official_eagle3").out


def test_facts_of_a_block_head(run: Run, tmp_path: Path, target: Path) -> None:
    facts = lines(run(BLOCK_FORMATS["speculators_dflash"]().write(tmp_path), "--model", target))
    assert facts["recognised"] == "DFlash in the layout of speculators"
    assert facts["reads"] == "inputs of layers [2, 5] (inputs of layers, as speculators counts them)"
    assert facts["tokens"] == "53, of which it proposes 12"
    assert facts["besides"] == "block of 5, 4 drafted, causal inside a block in layers 1"


@pytest.mark.parametrize(
    ("name", "kind", "parts"),
    [
        ("specforge_domino", "Domino", "GRU of 5, correction of rank 6"),
        (
            "zlab_dflash2",
            "DFlash2",
            "selector of rank 4 among 7 candidates, convolutions of 3 taps, 4 channels a group",
        ),
    ],
)
def test_scorers_of_a_block_head_are_named(
    run: Run, tmp_path: Path, target: Path, name: str, kind: str, parts: str
) -> None:
    facts = lines(run(BLOCK_FORMATS[name]().write(tmp_path), "--model", target))
    assert facts["recognised"] == f"{kind} in the layout of z-lab and SpecForge"
    assert facts["besides"] == f"block of 5, 4 drafted, {parts}"


def test_json_is_one_object(run: Run, heads: Path, target: Path) -> None:
    result = run(heads / "speculators_eagle3", "--model", target, "--json")
    assert (result.code, result.err, result.out.count("\n")) == (0, "", 1)
    found: dict[str, Any] = json.loads(result.out)
    tensors = found.pop("tensors")
    assert tensors["d2t"] == {"shape": [12], "dtype": "int64"}
    assert tensors.keys() == FORMATS["speculators_eagle3"]().tensors.keys()
    assert found == {
        "path": str(heads / "speculators_eagle3"),
        "kind": "EAGLE-3.1",
        "layout": "speculators",
        "verifier": "org/target",
        "trained_for": "org/target",
        "training": None,
        "target": str(target),
        "layer_ids": [3, 4, 8],
        "taps": [3, 4, 8],
        "other_taps": None,
        "num_layers": 1,
        "hidden_size": 24,
        "vocab_size": 53,
        "draft_vocab_size": 12,
        "max_position": 64,
        "rope_theta": 1000.0,
        "embedding": "file",
        "output": "file",
        "variants": ["norm_before_fc", "fc_norm", "norm_before_residual", "norm_output"],
        "assumptions": ["accept_tolerance 0.1 ignored: only the target's own tokens are accepted"],
    }


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_shown(run: Run, heads: Path, target: Path, name: str) -> None:
    assert lines(run(heads / name, "--model", target))["target"] == f"{target}: fits"


def test_a_terminal_gets_tables(run: Run, heads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    shown = run(heads / "official_eagle3").out
    assert re.search(r"│ recognised +│ EAGLE-3 in the layout of official EAGLE +│", shown)
    assert re.search(r"│ midlayer.mlp.up_proj.weight +│ \[28, 24\] │ float16 +│", shown)


@pytest.mark.parametrize(
    ("folder", "named"),
    [
        ("/no/such", "/no/such: no such folder"),
        ("ngram", "ngram: a draft source without weights; give the folder or hub name of a head"),
        ("{tmp}", "{tmp}: not a checkpoint: it holds no config.json"),
        ("{target}", "{target}: a whole model and no head; given to --draft it drafts as it is"),
        ("{heads}/medusa", "{heads}/medusa: a Medusa head (medusa_num_heads in config.json) is not supported"),
        ("{heads}/no_fc", "{heads}/no_fc: missing tensors: fc.weight"),
        (
            "{heads}/nothing",
            "{heads}/nothing: not a draft head of a known kind: no tensor 'hidden_norm.weight' of EAGLE-3, "
            "'markov_head.markov_w1.weight' of DSpark, 'prefix_gru.weight_ih_l0' of Domino, "
            "'candidate_selector.predecessor_codebook' of DFlash2, 'hidden_norm.weight' of DFlash, "
            "'fc.weight' of EAGLE-1/2, but 14 others (block.hidden_norm",
        ),
    ],
)
def test_checkpoints_that_are_no_head_are_told_in_one_line(
    run: Run, heads: Path, target: Path, tmp_path: Path, folder: str, named: str
) -> None:
    FORMATS["official_eagle3"]().write(heads / "medusa")
    edit_json(heads / "medusa" / "config.json", medusa_num_heads=3)
    fixture = FORMATS["official_eagle3"]()
    fixture.tensors = {name.replace("midlayer", "block"): tensor for name, tensor in fixture.tensors.items()}
    del fixture.tensors["fc.weight"]
    fixture.write(heads / "nothing")
    # It has an embedding and a norm like a whole model.
    fixture = FORMATS["specforge_eagle31"]()
    del fixture.tensors["fc.weight"]
    fixture.write(heads / "no_fc")
    places = {"tmp": tmp_path, "target": target, "heads": heads}
    result = run(folder.format(**places))
    assert (result.code, result.out) == (2, "")
    assert re.fullmatch("specdec: .*\n", result.err)
    assert named.format(**places) in result.err


def test_a_target_that_does_not_fit_is_told(run: Run, heads: Path) -> None:
    result = run(heads / "official_eagle3", "--model", DEMO / "target")
    assert (result.code, result.out) == (2, "")
    assert "the head reads states of size 24, but the target's hidden_size is 256" in result.err


@pytest.fixture
def named(heads: Path, target: Path, tmp_path: Path) -> Path:
    """A head of speculators whose target lies beside it."""
    shutil.copytree(target, tmp_path / "target")
    shutil.copytree(heads / "speculators_eagle3", tmp_path / "head")
    return tmp_path / "head"


def name_target(head: Path, name: str | None) -> None:
    config = json.loads((head / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = name
    (head / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("spelled", ["../target", "{target}"])
def test_the_target_is_the_one_that_the_head_names(run: Run, named: Path, target: Path, spelled: str) -> None:
    name = spelled.format(target=target)
    name_target(named, name)
    llm = LLM(draft=named, dtype="float64")
    assert llm.config.model.samefile(named / name)
    assert llm.engine.worker.runner.head is not None
    assert llm.engine.worker.runner.head.taps == (3, 4, 8)
    assert lines(run(named))["target"].endswith(f"{name}: fits")


def test_a_target_that_is_elsewhere_must_be_given(named: Path, target: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"head: its target org/target: no such folder, not in the hub's cache, .* hf download org/target",
    ):
        LLM(draft=named)
    assert LLM(target, named, dtype="float64").config.model == target


def test_a_head_that_names_no_target_is_for_the_demo_model(named: Path) -> None:
    name_target(named, None)
    with pytest.raises(ValueError, match="the target's hidden_size is 256"):
        LLM(draft=named)


@pytest.mark.long
def test_compare_runs_both_on_the_named_target(named: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name_target(named, "../target")
    vocab = {character: i for i, character in enumerate(string.ascii_letters + " ")}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab, []))).save_pretrained(named.parent / "target")
    options = ["--compare", "--json", "--max-tokens", "6", "--dtype", "float64", "--ignore-eos", "--fixed-drafts"]
    with pytest.raises(SystemExit) as exited:
        main(["generate", "hello", "--draft", str(named), *options])
    assert exited.value.code == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["equal"] is True
    assert len(answer["token_ids"]) == 6
