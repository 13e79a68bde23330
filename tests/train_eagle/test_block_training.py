"""Runs that train block heads: exact resume, heads that draft, their accuracy, and their export in both layouts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from specdec import LLM, DraftShape, SamplingParams
from specdec.cli.inspection import Inspection
from specdec.draft_heads.drafting.block_drafter import BlockDrafter
from specdec.draft_heads.heads.block_head import BlockHead
from specdec.draft_heads.heads.draft_head import DraftModel
from specdec.train_eagle.data.chat_mask import Sample
from specdec.train_eagle.data.prepared_data import PreparedData
from specdec.train_eagle.evaluation.accuracy import NO_TOKEN, accuracy, head_of, token_ranks
from specdec.train_eagle.evaluation.replay import KnownAnswer, replay
from specdec.train_eagle.passes.features import OnlineFeatures
from specdec.train_eagle.training.head_export import from_folder
from specdec.train_eagle.training.head_trainer import LossSettings
from specdec.train_eagle.training.read_config import read_config
from specdec.train_eagle.training.train_plan import TrainPlan
from specdec.train_eagle.training.train_run import TrainingRun
from specdec.train_eagle.training.training_kinds import TRAINING_KINDS
from specdec.train_eagle.training.training_state import saved_run
from tests import stages
from tests.fakes import save_random_llama
from tests.kernel_sets import TORCH
from tests.profiles import by_day

pytestmark = pytest.mark.slow

KINDS = ("dflash", "dspark")
SIZES = {"layers": 1, "block_size": 4, "mixed_precision": "no"}
SHAPE = DraftShape(4, 3, 8)
PROMPTS = [[5 + i, 20 + i, 41] for i in range(12)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose next token depends mostly on the last one, so that few texts teach it."""
    folder = tmp_path_factory.mktemp("target")
    save_random_llama(folder, num_hidden_layers=4, initializer_range=0.12)
    return folder


@pytest.fixture(scope="module")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's own answers."""
    prepared = PreparedData.begin(tmp_path_factory.mktemp("data"), {"format": 1}, ["answers.jsonl"])
    llm = LLM(target, draft=None, dtype="float32")
    prompts = torch.randint(5, 85, (48, 4), generator=torch.Generator().manual_seed(1)).tolist()
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    texts = [output.prompt_token_ids + output.token_ids for output in outputs]
    prepared.complete = True
    prepared.add([Sample(text, [place >= 4 for place in range(len(text))]) for text in texts])
    return prepared.folder


def run(target: Path, data: Path, out: Path, head: str, **changes: Any) -> TrainingRun:
    own = {"markov_rank": 8} if head == "dspark" else {}
    settings = {"model": target, "data": [data], "out": out, "head": head, **SIZES, **own, "held_out": 4, "epochs": 2}
    settings |= {"batch_tokens": 300, "warmup_steps": 2, "lr": 3e-3, "evaluate_prompts": 0, "tracker": "none"}
    return TrainingRun(read_config({**settings, **changes}))


@pytest.fixture(scope="module", params=KINDS)
def trained(request: pytest.FixtureRequest, target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of some epochs, and its run."""
    out = tmp_path_factory.mktemp(request.param)
    run(target, data, out, request.param, epochs=8, evaluate_prompts=4, evaluate_every=8).train()
    return out


def tau(target: Path, head: Path) -> float:
    llm = LLM(target, head, dtype="float32", shape=SHAPE, adaptive_drafts=False)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    stats = [output.stats for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    return sum(one.tokens for one in stats) / sum(one.steps for one in stats)


@pytest.mark.long
def test_a_trained_head_drafts_and_a_new_one_does_not(trained: Path, target: Path, data: Path, tmp_path: Path) -> None:
    run(target, data, tmp_path, trained.name[:6], epochs=1, lr=1e-9).train()
    assert tau(target, trained) > tau(target, tmp_path) + 0.3
    records = [json.loads(line) for line in (trained / "run" / "log.jsonl").read_text().splitlines()]
    assert [record["tau"] > 1 for record in records if "tau" in record] == [True]
    slots = 4 if "dspark" in trained.name else 3
    assert all(len(record["accuracy"]) == slots for record in records if "accuracy" in record)


@pytest.mark.long
def test_an_interrupted_run_goes_on_to_the_same_weights(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With blocks drawn anew in every batch, two batches a step."""
    settings: dict[str, Any] = {"anchors": 5, "draft_vocab_size": 70, "accumulate": 2, "checkpoint_minutes": 1e-6}
    run(target, data, tmp_path / "whole", "dspark", **settings).train()
    cut = run(target, data, tmp_path / "cut", "dspark", **settings)
    step, steps = cut.step, 2

    def interrupted(number: int) -> Any:
        if number == steps:
            raise KeyboardInterrupt
        return step(number)

    monkeypatch.setattr(cut, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    again = run(target, data, tmp_path / "cut", "dspark", **settings, resume=True)
    assert again.state.step == steps < again.total
    again.train()
    saved = [saved_run(tmp_path / name / "run") for name in ("whole", "cut")]
    whole, resumed = (one.head() for one in saved if one is not None)
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut")]
    assert all(torch.equal(tensor, files[1][name]) for name, tensor in files[0].items())


@pytest.mark.long
def test_ranks_are_those_of_training(trained: Path, target: Path) -> None:
    llm = LLM(target, trained, dtype="float64", shape=SHAPE, adaptive_drafts=False, kernels="torch")
    drafter = llm.engine.worker.drafter
    assert isinstance(drafter, BlockDrafter)
    head, params = drafter.head, SamplingParams(temperature=0, max_tokens=18, ignore_eos=True)
    (output,) = llm.generate([[7, 9, 11, 40]], params, use_tqdm=False)
    text = output.prompt_token_ids + output.token_ids
    if head.markov_head is not None:
        # A bias that matters, of all tokens, as in training.
        for weight in (head.markov_head.markov_w1.weight, head.markov_head.markov_w2.weight):
            weight.data.normal_(generator=torch.Generator().manual_seed(4))
        head.markov_head.candidates = head.llama.vocab_size
    sample = Sample(text, [place >= 4 for place in range(len(text))])
    batch = OnlineFeatures(llm.model, [sample], head.taps).batch([0])
    ranks = token_ranks(head, drafter.readout, batch, 5)
    slots = head.config.num_slots
    assert (ranks[slots:] == NO_TOKEN).all()
    kind = TRAINING_KINDS["dspark" if head.markov_head is not None else "dflash"]
    trainer = kind.trainer(head.module, llm.model.weights.lm_head_weight, LossSettings("ce")).double()
    with torch.no_grad():
        found = trainer(batch)
    # Training begins with the assistant's first token, ranks with the one before it.
    own = ranks[:slots, 1:]
    assert found.count.tolist() == (own != NO_TOKEN).sum(1).tolist()
    torch.testing.assert_close(found.accuracy * found.count, (own == 0).sum(1).double())


def test_accuracy_is_of_the_drafts_of_the_engine(trained: Path, target: Path) -> None:
    """In chains of likeliest tokens, a draft is accepted exactly where all up to it are the likeliest."""
    llm = LLM(target, trained, dtype="float64", shape=DraftShape(1, 1, 1), adaptive_drafts=False, kernels="torch")
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    outputs = llm.generate([[7, 9, 11]], params, use_tqdm=False)
    (output,) = outputs
    # A step drafts one token and emits one or two; where none is accepted, every token was drafted for.
    accepted = output.stats.accepted_per_depth[0]
    first = accuracy(llm, outputs, 1)[0][0] * (len(output.token_ids) - 1)
    assert accepted <= round(first)
    assert (accepted == 0) == (round(first) == 0)


@pytest.mark.long
def test_a_replay_takes_the_steps_of_the_engine(trained: Path, target: Path) -> None:
    llm = LLM(target, trained, dtype="float64", shape=SHAPE, adaptive_drafts=False, kernels="torch")
    head, readout = head_of(llm)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in PROMPTS]
    texts = [output.prompt_token_ids + output.token_ids for output in outputs]
    source = OnlineFeatures(llm.model, [Sample(text, [True] * len(text)) for text in texts], head.taps)
    answers = [KnownAnswer(source.batch([i]), len(prompt)) for i, prompt in enumerate(PROMPTS)]
    assert replay(DraftModel(head, readout), answers, SHAPE, TORCH) == [output.stats for output in outputs]


@pytest.mark.parametrize("layout", ["official", "speculators"])
def test_an_exported_head_drafts_the_same(layout: str, trained: Path, target: Path, tmp_path: Path) -> None:
    words = ["--run", trained / "run", "--out", tmp_path / "out", "--dtype", "float32", "--layout", layout]
    stages.run("export", words)
    stages.run("export", ["--draft", tmp_path / "out", "--out", tmp_path / "again", "--layout", layout])
    bfloat16, last = (tau(target, tmp_path / name) for name in ("again", "out"))
    assert last > 1.2
    assert bfloat16 == pytest.approx(last, rel=0.1)
    kind = "dspark" if "dspark" in trained.name else "dflash"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    if layout == "speculators":
        assert config["speculators_model_type"] == kind
        assert config["speculators_config"]["verifier"]["name_or_path"] == target.name
    else:
        assert config["architectures"] == ["Qwen3DSparkModel" if kind == "dspark" else "DFlashDraftModel"]
    _, front, text = (tmp_path / "out" / "README.md").read_text().split("---\n", 2)
    assert kind in yaml.safe_load(front)["tags"]
    assert f'"method": "{kind}"' in text
    assert f"One pass drafts {4 if kind == 'dspark' else 3} tokens" in text
    assert str(tmp_path) not in text
    seen = Inspection.of(tmp_path / "again", target)
    assert (seen.facts["trained for"], seen.facts["trained on"]) == (target.name, "answers.jsonl")


@torch.no_grad()
def test_a_fresh_head_begins_with_the_layers_of_its_target(target: Path, data: Path, tmp_path: Path) -> None:
    """Its context rows are the target's values behind the last tap, if that is all of a token's feature."""
    made = run(target, data, tmp_path, "dspark", layers=2, causal=True)
    head, model = made.head, made.model
    assert isinstance(head, BlockHead)
    assert head.config.causal == (True, True)
    batch, llama, form = made.source.batch([0]), head.llama, head.form(None)
    own = head.fc.weight[:, -llama.hidden_size :]
    own.copy_(torch.eye(llama.hidden_size))
    head.fc.weight[:, : -llama.hidden_size] = 0
    values = form.context(batch.read_by(form))[:, 0, llama.num_kv_heads :]
    layer = model.weights.decoder_layers[head.taps[-1]]
    assert layer.input_layernorm is not None
    qkv = layer.qkv_proj(layer.input_layernorm(batch.taps[:, -llama.hidden_size :]))
    expected = qkv[:, -llama.num_kv_heads * llama.head_dim :].view(values.shape)
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "part"), by_day([("gated", "run"), ("rnn", ""), ("rnn", "run"), ("gated", "")], 2))
def test_a_vanilla_markov_head_goes_on_as_another_kind(
    kind: str, part: str, target: Path, data: Path, tmp_path: Path
) -> None:
    """It begins with the same scores, from a run or from a head's folder; and not the other way round."""
    first = run(target, data, tmp_path / "first", "dspark", epochs=4)
    first.train()
    start = tmp_path / "first" / part
    same, other = (
        run(target, data, tmp_path / name, "dspark", start=start, markov_kind=name) for name in ("vanilla", kind)
    )
    expected, found = same._validate(), other._validate()
    torch.testing.assert_close(found.acceptance, expected.acceptance, rtol=0, atol=0.01)
    assert other.head.markov_head.kind == kind
    other.train()
    with pytest.raises(ValueError, match=r"does not fit|markov_head_type"):
        run(target, data, tmp_path / "back", "dspark", start=tmp_path / kind / part)


@pytest.mark.long
@pytest.mark.parametrize("part", ["run", ""])
def test_a_head_with_narrow_mlps_begins_with_the_strongest_neurons(
    part: str, target: Path, data: Path, tmp_path: Path
) -> None:
    """From a run or from a head's folder; and it exports and loads with its own size."""
    run(target, data, tmp_path / "wide", "dspark", epochs=1).train()
    start = tmp_path / "wide" / part
    _, wide, *_ = from_folder(tmp_path / "wide", target)
    assert isinstance(wide, BlockHead)
    strengths = list[torch.Tensor]()
    for layer in wide.decoder_layers:
        gate, up = layer.mlp.gate_up_proj.weight.chunk(2)
        strengths.append(gate.norm(dim=1) * up.norm(dim=1) * layer.mlp.down_proj.weight.norm(dim=0))
    # The run's weights are not rounded as the head's are, so two neurons of about equal strength may change places.
    ordered = torch.stack(strengths).sort(descending=True).values
    size = 4 + int((ordered[:, 3:12] / ordered[:, 4:13]).amin(0).argmax())
    made = run(target, data, tmp_path / "thin", "dspark", start=start, intermediate_size=size, epochs=1)
    assert isinstance(made.head, BlockHead)
    for given, found, strength in zip(wide.decoder_layers, made.head.decoder_layers, strengths, strict=True):
        gate, up = given.mlp.gate_up_proj.weight.chunk(2)
        down = given.mlp.down_proj.weight
        kept = sorted(strength.argsort(descending=True)[:size].tolist())
        torch.testing.assert_close(found.mlp.down_proj.weight, down[:, kept], rtol=0, atol=0.01)
        torch.testing.assert_close(found.mlp.gate_up_proj.weight, torch.cat([gate[kept], up[kept]]), rtol=0, atol=0.01)
        torch.testing.assert_close(found.qkv_proj.weight, given.qkv_proj.weight, rtol=0, atol=0.01)
    made.train()
    _, thin, *_ = from_folder(tmp_path / "thin", target)
    assert thin.llama.intermediate_size == size
    with pytest.raises(ValueError, match="size"):
        run(target, data, tmp_path / "back", "dspark", start=tmp_path / "thin" / part)


@pytest.mark.long
@pytest.mark.parametrize("part", ["run", ""])
def test_a_head_of_some_tokens_begins_with_one_of_all(part: str, target: Path, data: Path, tmp_path: Path) -> None:
    """From a run or from a head's folder; and it scores those tokens as that one does."""
    first = run(target, data, tmp_path / "all", "dspark", epochs=1)
    first.train()
    made = run(target, data, tmp_path / "some", "dspark", start=tmp_path / "all" / part, draft_vocab_size=20, epochs=1)
    head = made.head
    assert isinstance(head, BlockHead)
    assert head.lm_head is not None
    assert head.markov_head is not None
    tokens = head.draft_tokens
    assert 0 < len(tokens) <= 20
    torch.testing.assert_close(head.lm_head.weight, made.model.weights.lm_head_weight[tokens])
    whole = first.head.markov_head.markov_w2.weight[tokens]
    torch.testing.assert_close(head.markov_head.markov_w2.weight, whole, rtol=0, atol=0.01)
    made.train()


def test_sizes_follow_from_the_recipe_and_the_target() -> None:
    samples = [Sample([5] * 200, [place > 99 for place in range(200)])] * 300
    plans = {
        (kind, size): TrainPlan.of(read_config({"data": ["a"], "out": "b", "head": kind}), samples, size).settings
        for kind in KINDS
        for size in (256, 4096)
    }
    assert [plans["dspark", size]["markov_rank"] for size in (256, 4096)] == [64, 256]
    assert plans["dflash", 256]["markov_rank"] is None
    assert [plans[kind, 256]["block_size"] for kind in KINDS] == [8, 7]
    assert [plans[kind, 256]["loss"] for kind in KINDS] == ["ce", "ce-l1"]
    for name, value, kinds in (("unroll", 2, "eagle and eagle3"), ("layers", 2, "dflash and dspark")):
        head = "dspark" if name == "unroll" else "eagle3"
        with pytest.raises(ValueError, match=f"{name} is for {kinds} heads; leave it out of a run for {head}"):
            read_config({"data": ["a"], "out": "b", "head": head, name: value})
