"""Whole training runs: a head that drafts, and runs that are killed, spread over processes, or asked for nonsense."""

import io
import json
import re
import resource
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from specdec import LLM, DraftShape, SamplingParams
from specdec.cli.inspection import Inspection
from specdec.config import EAGLE2_SHAPE, default_shape
from specdec.draft_heads.heads.eagle3 import Eagle3Head, Eagle3Layer
from specdec.train_eagle.data.chat_mask import Sample
from specdec.train_eagle.evaluation import replay
from specdec.train_eagle.evaluation.replay import HeldOutTau
from specdec.train_eagle.program import main as program
from specdec.train_eagle.training import train_log
from specdec.train_eagle.training.read_config import read_config
from specdec.train_eagle.training.train_run import TrainingRun
from specdec.train_eagle.training.training_state import saved_run
from specdec.train_eagle.training.unrolled_loss import UnrolledLoss
from tests.fakes import edit_json
from tests.profiles import by_day
from tests.training_runs import (
    command,
    config,
    environment,
    last,
    losses,
    main,
    measure_tau,
    save_own_words,
    save_target,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_own_words(tmp_path_factory.mktemp("data"), target)


@torch.no_grad()
def test_an_eagle3_head_begins_with_a_layer_of_its_target(target: Path, data: Path, tmp_path: Path) -> None:
    """Without the embedding, it does with its last tap what the target's layer behind it does."""
    made = TrainingRun(config(target, data, tmp_path, head="eagle3"))
    head, model = made.head, made.model
    assert isinstance(head, Eagle3Head)
    hidden = head.llama.hidden_size
    assert head.fc.weight[:, -hidden:].sub(torch.eye(hidden)).abs().max() < 0.05
    first, layer = head.layers[0], model.weights.decoder_layers[head.taps[-1]]
    assert isinstance(first, Eagle3Layer)
    assert layer.input_layernorm is not None
    states = torch.randn(3, hidden, generator=torch.Generator().manual_seed(0))
    first.qkv_proj.weight[:, :hidden] = 0
    qkv = first.qkv_proj(torch.cat([first.input_layernorm(states), first.hidden_norm(states)], -1))
    torch.testing.assert_close(qkv, layer.qkv_proj(layer.input_layernorm(states)))
    torch.testing.assert_close(first.mlp.form(None)(states), layer.mlp.form(None)(states))


@pytest.mark.parametrize(
    "settings",
    by_day(
        [
            {"head": "eagle3", "draft_vocab_size": 70, "loss": "lk-hybrid"},
            {"head": "eagle", "feature_weight": 1.0, "noise": 0.1, "unroll": 2},
        ],
        2,
        short=1,
    ),
    ids=["eagle3", "eagle"],
)
def test_a_trained_head_drafts_better_than_a_new_one(
    target: Path, data: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    TrainingRun(config(target, data, tmp_path / "new", **settings, epochs=1, lr=1e-9)).train()
    TrainingRun(
        config(target, data, tmp_path / "trained", **settings, epochs=12, evaluate_prompts=2, evaluate_every=6)
    ).train()
    taus = []
    for name in ("new", "trained"):
        llm = LLM(target, tmp_path / name, dtype="float32", shape=DraftShape(3, 3, 8), adaptive_drafts=False)
        prompts = [[5 + i, 20 + i, 41] for i in range(12)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), use_tqdm=False)
        taus.append(sum(o.stats.tokens for o in outputs) / sum(o.stats.steps for o in outputs))
    assert taus[1] > taus[0]
    records = [json.loads(line) for line in (tmp_path / "trained" / "run" / "log.jsonl").read_text().splitlines()]
    assert [record["tau"] > 1 for record in records if "tau" in record] == [True, True]
    assert (tmp_path / "trained" / "run" / "curves.png").stat().st_size > 1000
    assert list((tmp_path / "trained" / "run" / "tensorboard").iterdir())


@pytest.mark.long
def test_kept_states_train_the_same_head(target: Path, data: Path, tmp_path: Path) -> None:
    TrainingRun(config(target, data, tmp_path / "online")).train()
    TrainingRun(config(target, data, tmp_path / "kept", features=tmp_path / "features")).train()
    # Kept ones are rounded to bfloat16.
    assert losses(tmp_path / "online") == pytest.approx(losses(tmp_path / "kept"), rel=2e-3)


def test_a_pass_computed_again_gives_the_same_gradients(target: Path, data: Path, tmp_path: Path) -> None:
    runs = [
        TrainingRun(config(target, data, tmp_path / str(again), gradient_checkpointing=again))
        for again in (False, True)
    ]
    for run in runs:
        run.accelerator.backward(run.wrapped(run.source.batch(run.batches[0])).total)
    for mine, other in zip(*(run.trained for run in runs), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_large_seeds_train(target: Path, data: Path, tmp_path: Path) -> None:
    """Numpy takes 32 bits: 4295 was refused at the first step."""
    run = TrainingRun(config(target, data, tmp_path, seed=2**40))
    assert run.step(0)[0].total.isfinite()


def test_a_run_that_diverges_ends_in_one_line(
    target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It trained weights of NaN to its end, and reported success."""
    main(command(target, data, tmp_path, "--lr", "1e30"), code=2)
    told = capsys.readouterr().err
    assert re.search(r"^specdec: the gradient of step \d is not finite; begin anew with --no-resume, and an --lr", told)
    assert told.count("\n") == 1
    assert saved_run(tmp_path / "run") is None


@pytest.mark.long
def test_weights_that_are_not_finite_replace_no_others(target: Path, data: Path, tmp_path: Path) -> None:
    """Neither the best head nor the last checkpoint."""
    run = TrainingRun(config(target, data, tmp_path, evaluate_every=1))
    real = run.step

    def step(number: int) -> Any:
        found = real(number)
        if number == run.total - 1:
            run.trained[0].data[0] = torch.nan
        return found

    run.step = step  # type: ignore[method-assign]
    told = (
        rf"the weights after step {run.total} are not finite; go on from its last checkpoint, of step \d+, by --start"
    )
    with pytest.raises(ValueError, match=told):
        run.train()
    assert 0 < last(tmp_path).step < run.total
    for kept in (last(tmp_path).head(), load_file(tmp_path / "model.safetensors")):
        assert all(tensor.isfinite().all() for tensor in kept.values() if tensor.is_floating_point())


def test_uneven_batches_of_a_step_are_one_batch(target: Path, data: Path, tmp_path: Path) -> None:
    """Each prediction counts the same: batches were averaged, so that those of short ones counted more."""
    run = TrainingRun(config(target, data, tmp_path, unroll=1, noise=0.0))
    held_out = list(range(len(run.plan.held_out)))
    gradients, found = [], []
    for batches, of_held_out in (([[0, 1, 2, 3, 4, 5]], [held_out]), ([[0], [1, 2, 3, 4, 5]], [[0], held_out[1:]])):
        run.batches, run.per_step = batches, len(batches)
        run.plan = replace(run.plan, held_out_batches=of_held_out)
        run._gradient(0)
        gradients.append([weight.grad.clone() for weight in run.trained if weight.grad is not None])
        run._forget_gradient()
        found.append(run._validate())
    assert len(gradients[0]) == len(run.trained)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.long
def test_a_full_disk_is_told_in_one_line_and_leaves_what_was_there(target: Path, data: Path, tmp_path: Path) -> None:
    """Safetensors and torch raise errors of their own, which ended in a traceback, and the best head was torn."""
    run = TrainingRun(config(target, data, tmp_path, epochs=1))
    run.train()
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"model.safetensors: cannot be written: .*[Ff]ile too large") as of_head:
            run.kind.files.save(run.head, tmp_path, {"other": 1})
        with pytest.raises(OSError, match=r"state/new: cannot be written: ") as of_state:
            run._save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not any("\n" in str(error.value) for error in (of_head, of_state))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()} == before
    assert last(tmp_path).step == run.total


def test_processes_send_each_other_no_buffers(target: Path, data: Path, tmp_path: Path) -> None:
    """The target's output matrix went to every process with each batch."""
    handler = TrainingRun(config(target, data, tmp_path)).accelerator.ddp_handler
    assert handler is not None
    assert not handler.broadcast_buffers


@pytest.mark.long
def test_two_processes_are_one_that_accumulates_twice(target: Path, data: Path, tmp_path: Path) -> None:
    settings = ("--epochs", "2", "--checkpoint-minutes", "60")
    alone = command(target, data, tmp_path / "one", *settings, "--accumulate", "2")
    main(alone)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    both = [*torchrun, "-m", "specdec.train_eagle.train", *command(target, data, tmp_path / "two", *settings)]
    done = subprocess.run(both, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = last(tmp_path / "one"), last(tmp_path / "two")
    assert one.step == two.step > 5
    for name, tensor in one.head().items():
        torch.testing.assert_close(tensor, two.head()[name], rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"epoch": 3}, "epoch is no setting of a training run"),
        ({"unroll": 0}, "unroll is 0"),
        ({"loss": "mse"}, "loss is 'mse'"),
        ({"lr": "fast"}, "lr is 'fast'"),
        ({"head": "eagle", "draft_vocab_size": 9}, "draft_vocab_size is for eagle3, dflash and dspark heads"),
        ({"feature_weight": 1}, "feature_weight is for eagle heads"),
    ],
)
def test_unknown_settings_are_refused_by_name(
    target: Path, data: Path, tmp_path: Path, words: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        config(target, data, tmp_path, **words)


def test_settings_come_from_a_file_and_options_win(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("data: [a, b]\nout: c\nlr: 1e-4\nepochs: 7\n")
    assert read_config({}, file).lr == 1e-4
    found = read_config({"lr": 0.25}, file)
    assert (found.data, found.lr, found.epochs) == ([Path("a"), Path("b")], 0.25, 7)
    file.write_text("data: [a]\nout: c\nlearning_rate: 1\n")
    with pytest.raises(ValueError, match="learning_rate is no setting"):
        read_config({}, file)


@pytest.mark.long
def test_a_folder_of_another_run_is_refused(
    target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    TrainingRun(config(target, data, tmp_path, epochs=1)).train()
    with pytest.raises(ValueError, match="holds a run with another lr"):
        TrainingRun(config(target, data, tmp_path, epochs=1, lr=1.0))
    capsys.readouterr()
    main(["--data", "null_block_table", "--out", str(tmp_path)], code=2)
    told = capsys.readouterr().err
    assert "null_block_table" in told
    assert told.count("\n") == 1


def test_too_little_data_is_named(target: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="64 conversations are too few to keep 70 apart"):
        TrainingRun(config(target, data, tmp_path, held_out=70))


@pytest.mark.long
def test_a_run_goes_on_from_another_ones_head(target: Path, data: Path, tmp_path: Path) -> None:
    TrainingRun(config(target, data, tmp_path / "first", epochs=4)).train()
    TrainingRun(config(target, data, tmp_path / "second", start=tmp_path / "first" / "run", lr=1e-9, seed=5)).train()
    assert losses(tmp_path / "second")[0] < losses(tmp_path / "first")[0] - 0.2
    with pytest.raises(ValueError, match="holds no head; start names the folder of a head, or"):
        TrainingRun(config(target, data, tmp_path / "third", start=tmp_path / "null_block_table"))
    with pytest.raises(ValueError, match="its head does not fit: Unexpected key"):
        TrainingRun(config(target, data, tmp_path / "third", start=tmp_path / "first" / "run", head="eagle"))


@pytest.mark.long
def test_a_run_with_a_window_is_a_start_for_that_window_alone(target: Path, data: Path, tmp_path: Path) -> None:
    TrainingRun(config(target, data, tmp_path / "first", epochs=1, window=64)).train()
    start = tmp_path / "first" / "run"
    with pytest.raises(ValueError, match="run: its layers see 64 tokens, and this run's all tokens; give the run that"):
        TrainingRun(config(target, data, tmp_path / "second", start=start))
    second = TrainingRun(config(target, data, tmp_path / "second", start=start, window=64))
    assert second.head.llama.layer_windows == (64,)


@pytest.mark.long
def test_a_served_head_is_trained_further_on_what_was_served(target: Path, data: Path, tmp_path: Path) -> None:
    """And takes its own place in the engine, with the same tokens in fewer steps."""
    own = {"draft_vocab_size": 70}
    TrainingRun(config(target, data, tmp_path / "served", **own, epochs=1)).train()
    shape, params = DraftShape(3, 3, 8), SamplingParams(temperature=1.0, max_tokens=20, seed=3, ignore_eos=True)
    prompts = [[5 + i, 20 + i, 41] for i in range(40)]
    settings: dict[str, Any] = {"dtype": "float32", "shape": shape, "adaptive_drafts": False}
    ring: dict[str, Any] = {"collect_drafts": tmp_path / "ring", "collect_drafts_share": 1.0}
    with LLM(target, tmp_path / "served", **settings, **ring) as llm:
        llm.generate(prompts, params, use_tqdm=False)
    further = {"start": tmp_path / "served", "epochs": 8, "evaluate_every": 8}
    TrainingRun(config(target, tmp_path / "ring", tmp_path / "new", **own, **further)).train()
    assert losses(tmp_path / "new")[0] < losses(tmp_path / "served")[0]
    assert losses(tmp_path / "new")[-1] < losses(tmp_path / "new")[0] - 0.15
    llm = LLM(target, tmp_path / "served", **settings)
    before = llm.generate(prompts, params, use_tqdm=False)
    llm.update_draft(tmp_path / "new")
    after = llm.generate(prompts, params, use_tqdm=False)
    assert [output.token_ids for output in after] == [output.token_ids for output in before]
    assert sum(output.stats.steps for output in after) < sum(output.stats.steps for output in before)
    with pytest.raises(ValueError, match="its draft_vocab_size is 70, and this run's 97; give the run the sizes"):
        TrainingRun(config(target, data, tmp_path / "third", start=tmp_path / "served"))
    with pytest.raises(ValueError, match="an EAGLE-3 head, which is another kind than this run's; give its --head"):
        TrainingRun(config(target, data, tmp_path / "third", start=tmp_path / "served", head="eagle"))


@pytest.mark.long
@pytest.mark.parametrize("own", [{"head": "eagle"}, {"head": "dflash"}, {"head": "dspark", "draft_vocab_size": 50}])
def test_a_head_in_a_folder_is_a_start_with_all_its_weights(
    target: Path, data: Path, tmp_path: Path, own: dict[str, Any]
) -> None:
    """A DFlash head's folder holds no embedding: it is the target's, which a fresh head has."""
    settings = {"unroll": None, **own}
    first = TrainingRun(config(target, data, tmp_path / "first", **settings))
    first.kind.files.save(first.head, tmp_path / "saved", {}, torch.float32)
    fresh, second = (
        TrainingRun(config(target, data, tmp_path / "second", **settings, seed=5, start=start)).head.state_dict()
        for start in (None, tmp_path / "saved")
    )
    assert any(not torch.equal(fresh[name], tensor) for name, tensor in first.head.state_dict().items())
    assert all(torch.equal(second[name], tensor) for name, tensor in first.head.state_dict().items())
    narrowed = TrainingRun(config(target, data, tmp_path / "less", **settings, window=64, start=tmp_path / "saved"))
    assert set(narrowed.head.llama.layer_windows) == {64}
    assert all(torch.equal(narrowed.head.state_dict()[name], one) for name, one in first.head.state_dict().items())
    edit_json(tmp_path / "saved" / "config.json", sliding_window=70)
    with pytest.raises(ValueError, match="saved: its layers see 70 tokens, and this run's all tokens; give"):
        TrainingRun(config(target, data, tmp_path / "second", **settings, start=tmp_path / "saved"))
    third = TrainingRun(config(target, data, tmp_path / "third", **settings, window=70, start=tmp_path / "saved"))
    assert all(torch.equal(third.head.state_dict()[name], tensor) for name, tensor in first.head.state_dict().items())


@pytest.mark.long
def test_a_run_says_what_it_does_and_keeps_its_settings(
    target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plan, begin or resume, summary; and the settings as a file that trains the same head."""
    words = command(target, data, tmp_path / "a", "--epochs", "1")
    main(words)
    first = capsys.readouterr().out
    for start in (
        "data      60 conv",
        "head      eagle3, ",
        "steps     ",
        "minutes   about ",
        "begins    a new run in ",
    ):
        assert f"\n{start}" in f"\n{first}"
    assert re.search(r"step \d+/\d+ held out: loss \d+\.\d+ accuracy ([\d.]+ ?)+, tau \d\.\d\d", first)
    assert "\ntrained   " in first
    assert "\nnext      specdec evaluate --model " in first
    main(words)
    again = capsys.readouterr().out
    assert "\nresumes   after step " in again
    kept = last(tmp_path / "a").head()
    main([*words, "--no-resume"])
    assert "\nbegins    a new run" in capsys.readouterr().out
    main(["--config", str(tmp_path / "a" / "run" / "settings.yaml"), "--out", str(tmp_path / "b")])
    for out in ("a", "b"):
        assert all(torch.equal(tensor, kept[name]) for name, tensor in last(tmp_path / out).head().items())
    main([*command(target, data, tmp_path / "c"), "--resume"], code=2)
    assert "c/run: holds no state to resume; leave out --resume" in capsys.readouterr().err


@pytest.mark.long
def test_beside_tau_stands_the_tree_and_both_trees_are_shown(
    target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """60 nodes, by which heads are compared, and 15, with which a CPU serves: while it runs, at the end, and later."""
    # In bfloat16 the run's kernels and the engine's round differently, and tau with them.
    given = {"--evaluate-prompts": "4", "--epochs": "2", "--mixed-precision": "no"}
    main(command(target, data, tmp_path / "head", *(word for pair in given.items() for word in pair)))
    printed = capsys.readouterr().out
    both = r"tau \d\.\d\d \(60 nodes, depth 6\), \d\.\d\d \(15 nodes, depth 6\)"
    assert re.search(rf"^step .* held out: .*, {both}$", printed, re.MULTILINE)
    assert re.search(rf"^head      the best one, .*; {both} on 4 held-out prompts$", printed, re.MULTILINE)
    assert not re.search(r"tau \d\.\d\d(?! \()", printed)
    recipe = json.loads((tmp_path / "head" / "config.json").read_text())["training"]
    held_out = TrainingRun(config(target, data, tmp_path / "same")).plan.held_out
    prompts = [list(sample.token_ids[: sample.mask.index(True)]) for sample in held_out]
    for shape in (EAGLE2_SHAPE, default_shape("cpu")):
        tau = measure_tau(target, tmp_path / "head", prompts, shape=shape, dtype="float32").tau
        assert recipe["held_out_tau"][shape.in_words] == pytest.approx(tau, abs=1e-4)
    seen = Inspection.of(str(tmp_path / "head"), str(target)).facts["trained on"]
    assert re.search(rf"; {both} on 4 held-out prompts$", seen)
    with pytest.raises(SystemExit):
        program(["export", "--draft", str(tmp_path / "head"), "--out", str(tmp_path / "out")])
    assert re.search(rf"`held_out_tau` \| {both[4:]} \|", (tmp_path / "out" / "README.md").read_text())


def test_kept_requests_without_prompts_are_not_answered(tmp_path: Path) -> None:
    """The last tokens of a long output, all of them the assistant's: their prompts were empty."""
    long, short = Sample([5] * 9, [True] * 9), Sample([6] * 9, [False] * 2 + [True] * 7)
    given: tuple[Any, ...] = (None, tmp_path, None, tmp_path)
    for held_out, prompts in (([long, short, long, short], [[6, 6]] * 2), ([long], [])):
        tau = HeldOutTau(*given, held_out, 3)
        assert (tau._prompts, tau.num_prompts) == (prompts, len(prompts))


def test_held_out_prompts_are_answered_before_the_first_step(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that found no room ended runs at their first evaluation."""

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("no room")

    monkeypatch.setattr(replay, "LLM", refuse)
    run = TrainingRun(config(target, data, tmp_path, evaluate_prompts=2))
    with pytest.raises(ValueError, match="no room"):
        run.train()
    assert run.state.step == 0


@pytest.mark.long
def test_curves_are_drawn_while_it_runs(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []

    def draw(records: list[dict[str, Any]], _: Path) -> None:
        steps.append(records[-1])

    monkeypatch.setattr(train_log, "draw_curves", draw)
    run = TrainingRun(config(target, data, tmp_path, epochs=3, evaluate_every=1))
    run.train()
    assert len({record["step"] for record in steps}) == 3
    assert steps[0]["step"] < steps[-1]["step"] == run.total


def test_a_terminal_changes_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step, every tenth and the last, in less than half a minute: on a terminal it was every step."""
    part = torch.zeros(1)
    for terminal in (False, True):
        monkeypatch.setattr(train_log, "Console", partial(Console, file=io.StringIO(), force_terminal=terminal))
        accelerator: Any = SimpleNamespace(log=lambda *_, **__: None)
        with train_log.TrainLog(tmp_path / str(terminal), accelerator, 25, 0) as log:
            for step in range(1, 26):
                log.step(step, step, 1, 1.0, UnrolledLoss(part, part, part, part, part, part), 0.1, 1.0)
        assert [record["step"] for record in log.records()] == [1, 10, 20, 25]


@pytest.mark.long
def test_trackers_are_chosen(target: Path, data: Path, tmp_path: Path) -> None:
    run, begun = TrainingRun(config(target, data, tmp_path / "none", epochs=1, tracker="none")), []
    run.accelerator.init_trackers = lambda *words, **more: begun.append((words, more))  # type: ignore[method-assign]
    run.train()
    (((project,), more),) = begun
    # wandb's project was called tensorboard, and had no settings.
    assert (project, more["init_kwargs"]["wandb"]["config"]["lr"]) == ("specdec", 3e-3)
    assert not (tmp_path / "none" / "run" / "tensorboard").exists()
    if find_spec("wandb") is not None:
        pytest.skip("wandb is installed")
    with pytest.raises(ValueError, match="tracker is wandb, which is not installed; run: pip install wandb"):
        TrainingRun(config(target, data, tmp_path / "wandb", tracker="wandb"))
