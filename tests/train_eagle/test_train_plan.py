"""Plans of training: settings that fit the data, and warnings where those given do not."""

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.train_eagle.data.chat_mask import Sample
from specdec.train_eagle.program import main
from specdec.train_eagle.training.read_config import read_config
from specdec.train_eagle.training.train_config import RECIPES, LossKind
from specdec.train_eagle.training.train_plan import TrainPlan
from specdec.train_eagle.training.training_kinds import TRAINING_KINDS


def samples(count: int, length: int = 200) -> list[Sample]:
    return [Sample([5] * length, [i > length // 2 for i in range(length)]) for _ in range(count)]


def plan(count: int, length: int = 200, hidden_size: int = 4096, **settings: Any) -> TrainPlan:
    return TrainPlan.of(read_config({"data": ["a"], "out": "b", **settings}), samples(count, length), hidden_size)


@given(st.lists(st.integers(1, 5), min_size=2, max_size=60), st.integers(1, 20))
def test_answers_of_one_conversation_are_on_one_side(answers: list[int], held_out: int) -> None:
    """Each number is of a conversation, whose samples hold its place as their tokens."""
    drawn = [
        Sample([5 + place] * 200, [False] * 100 + [True] * 100, continues=i > 0)
        for place, count in enumerate(answers)
        for i in range(count)
    ]
    config = read_config({"data": ["a"], "out": "b", "held_out": min(held_out, len(answers) - 1)})
    found = TrainPlan.of(config, drawn, 4096)
    trained, apart = ({sample.token_ids[0] for sample in part} for part in (found.samples, found.held_out))
    assert not trained & apart
    assert len(apart) == config.held_out
    assert len(found.samples) + len(found.held_out) == sum(answers)


@pytest.mark.parametrize("count", [2, 7, 40, 131, 300, 2000, 8000])
def test_no_amount_of_data_is_planned_into_the_ground(count: int) -> None:
    """131 conversations gave 10 steps, all of them warm-up, of the 31 that were not held out."""
    found = plan(count)
    used = found.settings
    # More than ten prompts for tau, where that leaves four fifths of the data to train on.
    assert len(found.held_out) == max(1, min(100, max(count // 20, min(12, count // 5))))
    assert len(found.held_out) + len(found.samples) == count
    assert 1 <= used["warmup_steps"] <= max(1, found.total // 10)
    assert 10 <= used["epochs"] <= 40
    assert used["evaluate_every"] <= used["epochs"] / 2
    if count >= 100:
        assert found.total >= 150
    assert not [line for line in found.warnings if "lower it" in line]
    assert bool(found.warnings) == (count < 1000)
    # What is settled stays as it is.
    assert plan(count, **{name: used[name] for name in ("epochs", "batch_tokens", "lr")}).settings == used


def test_much_data_has_the_settings_of_large_runs() -> None:
    used = plan(8000).settings
    assert {name: used[name] for name in ("held_out", "epochs", "batch_tokens", "warmup_steps", "lr")} == {
        "held_out": 100,
        "epochs": 10,
        "batch_tokens": 8192,
        "warmup_steps": 50,
        "lr": 1e-4,
    }


def test_a_run_has_the_batches_of_a_step() -> None:
    """Fewer ended in an IndexError at the first step."""
    few = {"epochs": 1, "batch_tokens": 800, "held_out": 1}
    told = "3 batches of 800 tokens in 1 epochs are fewer than the 4 of one step, accumulate 4 in 1 processes; lower"
    with pytest.raises(ValueError, match=told):
        plan(13, accumulate=4, **few)
    assert plan(13, accumulate=3, **few).total == 1


def test_a_batch_holds_the_longest_conversation() -> None:
    assert plan(20, length=3000).settings["batch_tokens"] == 3000


def test_a_batch_holds_the_longest_held_out_conversation() -> None:
    """The first one is held out; it ended a run at its first evaluation."""
    texts = samples(1, 3000) + samples(20)
    found = TrainPlan.of(read_config({"data": ["a"], "out": "b"}), texts, 4096)
    assert len(found.held_out[0].token_ids) == found.settings["batch_tokens"] == 3000
    assert sorted(i for batch in found.held_out_batches for i in batch) == list(range(len(found.held_out)))
    with pytest.raises(ValueError, match="a conversation has 3000 tokens, more than batch_tokens 1024; raise it"):
        TrainPlan.of(read_config({"data": ["a"], "out": "b", "batch_tokens": 1024}), texts, 4096)


def test_narrow_targets_learn_faster() -> None:
    assert [plan(300, hidden_size=size).settings["lr"] for size in (8192, 4096, 256, 32)] == pytest.approx(
        [5e-5, 1e-4, 1.6e-3, 2e-3]
    )


def test_eagle_has_the_published_recipe() -> None:
    """Li et al. 2024: smooth L1 of features plus a tenth of the cross entropy, over features with noise, one pass."""
    used = plan(300, head="eagle").settings
    published = {"feature_weight": 1.0, "token_weight": 0.1, "noise": 0.1, "unroll": 1, "clip_norm": 0.5, "lr": 3e-5}
    assert {name: used[name] for name in published} == published
    assert plan(300, head="eagle", noise=0.0, token_weight=2).settings["noise"] == 0.0


def test_settings_that_do_not_fit_are_warned_of() -> None:
    few, held_out, warm_up = plan(131, held_out=100, epochs=10, batch_tokens=8192, warmup_steps=50).warnings
    assert few == "31 conversations and 10 steps are few: heads are trained on tens of thousands; expect a low tau"
    assert held_out == "held_out 100 is more than a fifth of the data; lower it"
    assert warm_up == "warmup_steps 50 is more than half of 10 steps; lower it"


def test_too_few_conversations_are_refused() -> None:
    with pytest.raises(ValueError, match="1 conversations are too few to keep 1 apart; prepare more"):
        plan(1)
    with pytest.raises(ValueError, match="5 conversations are too few to keep 5 apart; lower held_out"):
        plan(5, held_out=5)


def test_the_plan_is_told() -> None:
    found = plan(300)
    lines = found.lines(1000, 2000.0, [True] * 97)
    assert lines[0] == "data      285 conversations to train on, 57,000 tokens, 50% the assistant's; 15 held out"
    assert lines[1] == "head      eagle3, 1,000 weights to train; proposes all 97 tokens"
    assert f"{found.total:,} steps in" not in lines[2]
    assert lines[2].startswith(f"steps     {found.total:,} in 10 epochs, of at most 2,850 tokens; {found.total // 20} ")
    assert lines[3] == f"minutes   about {570_000 / 2000 / 60:.1f} at 2,000 tokens/s, and 10 evaluations of 15 prompts"


def test_the_plan_tells_what_a_head_cannot_propose() -> None:
    texts = [Sample([1, 5, 6, 7, 8], [False, True, True, True, True])] * 2
    found = TrainPlan.of(read_config({"data": ["a"], "out": "b"}), texts, 32)
    line = found.lines(1000, 2000.0, [token in (5, 6, 8) for token in range(20)])[1]
    assert line.endswith("; proposes 3 of 20 tokens, 75.0% of what the assistant says; --draft-vocab-size 0: all")


# Hidden size, MLP, layers, query heads, key-value heads, tokens; of the models' config.json.
TARGETS = {
    "Llama-3.1-8B": ((4096, 14336, 32, 32, 8, 128256), 32000),
    "Qwen3-4B": ((2560, 9728, 36, 32, 8, 151936), 32000),
    "Llama-3.2-1B": ((2048, 8192, 16, 32, 8, 128256), 32000),
    "Vicuna-7B": ((4096, 11008, 32, 32, 32, 32000), 0),
    "SmolLM2-135M": ((576, 1536, 30, 9, 3, 49152), 8704),
    "demo": ((256, 704, 10, 4, 2, 4096), 0),
}


@pytest.mark.parametrize("name", TARGETS)
def test_large_targets_have_the_published_draft_vocabulary_and_small_ones_a_smaller(name: str) -> None:
    (hidden, inner, layers, heads, kv_heads, vocab), tokens = TARGETS[name]
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocab}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 64 if hidden < 600 else 128}
    target = LlamaConfig.from_json({"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 1e4, **sizes})
    assert TRAINING_KINDS["eagle3"].default_draft_vocab(target) == tokens
    # Others use the target's output matrix, which is not trained.
    assert all(kind.default_draft_vocab(target) == 0 for other, kind in TRAINING_KINDS.items() if other != "eagle3")


def test_saved_settings_are_a_run_of_their_own(tmp_path: Path) -> None:
    found = plan(300)
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(found.plain_settings))
    again = TrainPlan.of(read_config({}, tmp_path / "settings.yaml"), samples(300), 4096)
    assert (again.settings, again.batches) == (found.settings, found.batches)


def test_choices_stand_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(RECIPES) == list(TRAINING_KINDS)
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    for choices in (tuple(RECIPES), get_args(LossKind), ("auto", "bf16", "no")):
        assert "|".join(choices) in shown


def test_without_the_extra_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("specdec.kernels.types.extras.find_spec", lambda name: None if name == "accelerate" else name)
    with pytest.raises(SystemExit):
        main(["train", "--data", "a", "--out", "b"])
    told = "specdec: train needs accelerate; run: pip install 'specdec[train]'\n"
    assert capsys.readouterr().err == told
