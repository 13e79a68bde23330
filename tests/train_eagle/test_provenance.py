"""Data, answers, heads and runs are joined with the target that they are for, or refused before anything loads."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec import LLM, SamplingParams
from specdec.building import build
from specdec.cli.inspection import Inspection
from specdec.config import DEMO
from specdec.train_eagle.data.prepared_data import PreparedData
from specdec.train_eagle.program import main
from specdec.train_eagle.training import train_run
from specdec.train_eagle.training.read_config import read_config
from specdec.train_eagle.training.train_run import TrainingRun
from tests import stages
from tests.fakes import edit_json
from tests.word_llama import WORDS, save_word_llama


class World(NamedTuple):
    """Targets `own` and `other`, which only their tokens tell apart, and `wide`; the rest is made for `own`."""

    folder: Path

    def __getattr__(self, name: str) -> Path:
        return self.folder / name


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World(tmp_path_factory.mktemp("world"))
    for name in ("own", "other"):
        save_word_llama(world.folder / name, num_hidden_layers=7)
    save_word_llama(world.wide, num_hidden_layers=7, hidden_size=48)
    tokenizer = json.loads((world.other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["w1"], vocab["w2"] = vocab["w2"], vocab["w1"]
    (world.other / "tokenizer.json").write_text(json.dumps(tokenizer))
    chats = [
        [{"role": "user", "content": WORDS[i]}, {"role": "assistant", "content": " ".join(WORDS[i : i + 9])}]
        for i in range(30)
    ]
    (world.folder / "chats").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    stages.prepare(world.own, [world.chats], world.prepared)
    TrainingRun(read_config(settings(world))).train()
    words = ["--model", world.own, "--draft", world.head, "--data", f"a={world.chats}", "--limit", 2]
    call("evaluate", *words, "--max-tokens", 4, "--speed-prompts", 0, "--out", world.evaluation)
    call("regenerate", "--model", world.own, "--data", world.chats, "--out", world.answers, "--max-tokens", 40)
    return world


@pytest.fixture
def world(made: World, tmp_path: Path) -> World:
    """A copy that a test may change."""
    shutil.copytree(made.folder, tmp_path / "world")
    return World(tmp_path / "world")


def settings(world: World, **changes: Any) -> dict[str, Any]:
    fixed = {"model": world.own, "data": [world.prepared], "out": world.head, "held_out": 2, "epochs": 1, "unroll": 2}
    return {**fixed, "batch_tokens": 60, "mixed_precision": "no", "evaluate_prompts": 0, "tracker": "none", **changes}


def call(*words: object, code: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert (ended.value.code or 0) == code


Refused = Callable[..., str]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run a command that must load no weights, print nothing, and fail with one line; return the line."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    def run(*words: object) -> str:
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(train_run, "load_llama", load)
            patch.setattr(build, "load_target", load)
            call(*words, code=2)
        printed = capsys.readouterr()
        assert (printed.out, printed.err.count("\n")) == ("", 1), printed
        return printed.err

    return run


def train(world: World, model: Path, *words: object) -> list[object]:
    fixed = ["train", "--model", model, "--data", world.prepared, "--out", world.folder / "new", "--held-out", 2]
    fixed += ["--epochs", 1, "--unroll", 2, "--evaluate-prompts", 0, "--batch-tokens", 60, "--mixed-precision", "no"]
    return [*fixed, "--tracker", "none", *words]


def names_both(told: str, world: World, which: str) -> bool:
    """Return whether a message names the two targets, and how they differ."""
    return "made for own" in told and str(world.folder / which) in told and "tokenizer" in told


@pytest.mark.long
def test_training_refuses_data_of_other_tokens(world: World, refused: Refused) -> None:
    told = refused(*train(world, world.other))
    assert names_both(told, world, "other")
    assert f"--data {world.prepared}" in told
    assert "give that target by --model" in told


@pytest.mark.long
def test_the_default_target_is_one_too(world: World, refused: Refused) -> None:
    """`prepare` or `train` without --model takes the demo's."""
    told = refused("train", "--data", world.prepared, "--out", world.folder / "new")
    assert "made for own" in told
    assert "specdec/demo/target" in told
    stages.prepare(DEMO / "target", [world.chats], world.folder / "demo")
    told = refused("train", "--model", world.own, "--data", world.folder / "demo", "--out", world.folder / "new")
    assert "made for target" in told
    assert str(world.own) in told


def test_tokens_beyond_the_targets_are_named(world: World, refused: Refused) -> None:
    """Data without a tokenizer has ids alone."""
    index = json.loads((world.prepared / "index.json").read_text())
    index["settings"].pop("vocabulary", None)
    (world.prepared / "index.json").write_text(json.dumps(index))
    file = world.prepared / index["shards"][0]["file"]
    tensors = load_file(file)
    tensors["tokens"][3] = 97
    save_file(tensors, file)
    assert "has token 97" in (told := refused(*train(world, world.own)))
    assert f"{world.own} has 97 tokens" in told


def test_conversations_longer_than_the_targets_positions_are_named(world: World, refused: Refused) -> None:
    """Training ended in an IndexError at the first batch with one."""
    edit_json(world.own / "config.json", max_position_embeddings=12)
    longest = max(len(sample.token_ids) for sample in PreparedData(world.prepared).load())
    told = refused(*train(world, world.own))
    assert f"--data {world.prepared}: has a conversation of {longest} tokens" in told
    assert f"{world.own} has 12 positions; prepare it anew with --max-length 12" in told


def test_preparing_refuses_answers_of_another_target(world: World, refused: Refused) -> None:
    told = refused("prepare", "--model", world.other, "--data", world.answers, "--out", world.folder / "new")
    assert names_both(told, world, "other")
    assert not (world.folder / "new").exists()
    # Of text without a journal nothing is known.
    shutil.copy(world.answers, world.folder / "text.jsonl")
    call("prepare", "--model", world.other, "--data", world.folder / "text.jsonl", "--out", world.folder / "new")


@pytest.mark.parametrize("start", ["head", "head/run"])
def test_a_start_of_another_target_is_refused(world: World, refused: Refused, start: str) -> None:
    for name, told in (("other", ("tokenizer", "own")), ("wide", ("32", "48"))):
        model, data = world.folder / name, world.folder / f"for-{name}"
        stages.prepare(model, [world.chats], data)
        words = ["--model", model, "--data", data, "--out", world.folder / "new", "--start", world.folder / start]
        line = refused("train", *words)
        assert all(part in line for part in (*told, str(model), str(world.folder / start))), line


@pytest.mark.long
def test_a_run_of_other_weights_or_other_data_is_refused(world: World, refused: Refused) -> None:
    """At the same paths."""
    call(*train(world, world.own))
    save_word_llama(world.own, num_hidden_layers=7, seed=1)
    told = refused(*train(world, world.own))
    assert "holds a run with another target: own (" in told
    assert ", not own (" in told
    assert "--no-resume" in told


@pytest.mark.long
def test_a_run_of_data_prepared_anew_is_refused(world: World, refused: Refused) -> None:
    call(*train(world, world.own))
    shutil.rmtree(world.prepared)
    stages.prepare(world.own, [world.chats], world.prepared, limit=20)
    assert "holds a run with another contents: ['prepared (" in refused(*train(world, world.own))


@pytest.mark.long
def test_kept_states_of_another_target_are_refused(world: World) -> None:
    features = world.folder / "features"
    TrainingRun(read_config(settings(world, out=world.folder / "a", features=features))).train()
    save_word_llama(world.own, num_hidden_layers=7, seed=1)
    with pytest.raises(ValueError, match=r"holds features of other settings, made with another target: own \("):
        TrainingRun(read_config(settings(world, out=world.folder / "b", features=features)))


@pytest.mark.parametrize("stage", ["evaluate", "inspect", "export", "regenerate"])
def test_a_head_of_another_target_is_refused(world: World, refused: Refused, stage: str) -> None:
    data = f"a={world.chats}" if stage == "evaluate" else world.chats
    rest = {"inspect": [], "export": ["--out", world.folder / "new"]}.get(
        stage, ["--data", data, "--out", world.folder / "new"]
    )
    head = [world.head] if stage == "inspect" else ["--draft", world.head]
    told = refused(stage, *head, "--model", world.other, *rest)
    assert names_both(told, world, "other")
    assert str(world.head) in told
    told = refused(stage, *head, "--model", world.wide, *rest)
    assert "states of size 32, but the target's hidden_size is 48" in told
    assert str(world.head) in told
    assert str(world.wide) in told
    assert not (world.folder / "new").exists()
    assert Inspection.of(str(world.head), str(world.own)).facts["target"].endswith("fits")


def test_a_run_is_exported_for_its_own_target(world: World, refused: Refused) -> None:
    told = refused("export", "--run", world.head / "run", "--model", world.other, "--out", world.folder / "new")
    assert "own" in told
    assert str(world.other) in told


def test_a_card_takes_no_figures_of_another_head(world: World, refused: Refused) -> None:
    figures = ["--evaluation", world.evaluation / "evaluation.json", "--out", world.folder / "new"]
    call("export", "--draft", world.head, *figures)
    call("export", "--draft", world.folder / "new", *figures[:2], "--out", world.folder / "again")
    tensors = load_file(world.head / "model.safetensors")
    tensors["fc.weight"] += 1
    save_file(tensors, world.head / "model.safetensors")
    told = refused("export", "--draft", world.head, *figures)
    assert "the evaluation is of " in told
    assert "evaluate the head to export, or leave out --evaluation" in told


def test_answers_of_another_model_are_refused_before_it_loads(world: World, refused: Refused) -> None:
    words = ["--data", world.chats, "--out", world.answers, "--max-tokens", 40]
    told = refused("regenerate", "--model", world.other, *words)
    assert "made with model own (" in told
    assert ", not other (" in told
    assert "made with max_tokens 40, not 41" in refused("regenerate", "--model", world.own, *words[:-1], 41)


def test_kept_requests_name_their_tokens(world: World, refused: Refused) -> None:
    ring: dict[str, Any] = {"collect_drafts": world.folder / "ring", "collect_drafts_share": 1.0}
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    with LLM(world.own, None, dtype="float32", **ring) as engine:
        engine.generate([[5 + i, 6, 7] for i in range(12)], params, use_tqdm=False)
    assert PreparedData(world.folder / "ring").conversations == 12
    told = refused("train", "--model", world.other, "--data", world.folder / "ring", "--out", world.folder / "new")
    assert names_both(told, world, "other")
    # Another engine whose target has the same name and other tokens.
    shutil.copytree(world.other, world.folder / "moved" / "own")
    with pytest.raises(ValueError, match="holds other data"):
        LLM(world.folder / "moved" / "own", None, dtype="float32", **ring)


def test_the_tokens_are_recorded_once_and_shown_to_nobody(world: World) -> None:
    """In data, in a head and in an evaluation; not in a card."""
    digests = {
        json.loads((world.prepared / "index.json").read_text())["settings"]["vocabulary"],
        json.loads((world.head / "config.json").read_text())["training"]["vocabulary"],
        json.loads((world.evaluation / "evaluation.json").read_text())["vocabulary"],
    }
    assert len(digests) == 1
    edit_json(world.head / "config.json", architectures=None)
    call("export", "--draft", world.head, "--out", world.folder / "new")
    assert digests.pop() not in (world.folder / "new" / "README.md").read_text()
    assert torch.equal(*(load_file(folder / "model.safetensors")["fc.weight"] for folder in (world.head, world.new)))
