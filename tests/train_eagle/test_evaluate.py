"""Figures of a head: those of the engine, and ranks that predict what the engine accepts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec import LLM, DraftShape, SamplingParams
from specdec.bench.timed_run import EngineContender, TimedRun
from specdec.config import EAGLE2_SHAPE, default_shape
from specdec.core.outputs import SpeculationStats
from specdec.draft_heads.drafting.model_drafter import ModelDrafter
from specdec.draft_heads.formats.head_kinds import KINDS
from specdec.draft_heads.heads.draft_head import DraftModel
from specdec.train_eagle.data.chat_mask import BadConversation, Sample
from specdec.train_eagle.data.chat_prompts import question
from specdec.train_eagle.data.conversations import BadData, Entry, Place
from specdec.train_eagle.data.stage_settings import EvaluateSettings
from specdec.train_eagle.evaluation.accuracy import NO_TOKEN, accuracy, head_of, token_ranks
from specdec.train_eagle.evaluation.evaluation import Evaluation
from specdec.train_eagle.evaluation.head_evaluation import accepted_shares, answer, evaluate
from specdec.train_eagle.evaluation.replay import KnownAnswer, replay
from specdec.train_eagle.passes.features import OnlineFeatures
from specdec.train_eagle.training.head_trainer import LossSettings
from specdec.train_eagle.training.training_kinds import TRAINING_KINDS
from tests import stages
from tests.fakes import TINY, save_random_eagle3, save_random_head, save_random_llama, save_shallow_llama
from tests.kernel_sets import TORCH
from tests.profiles import num_cases
from tests.training_runs import measure_tau

pytestmark = pytest.mark.slow

VOCAB = TINY["vocab_size"]
SHAPES = {"chains of likeliest tokens": DraftShape(4, 1, 4), "three tokens": DraftShape(1, 3, 3)}
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] + ' <end> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    # With weights this small the next token depends less on what is far back, and heads are right more often.
    save_random_llama(folder, initializer_range=0.15)
    names = ["<pad>", "<bos>", "<end>", "<user>", "<assistant>", *(f"w{i}" for i in range(VOCAB - 6)), "<unk>"]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


def save_echo(kind: str, folder: Path, target: Path) -> Path:
    """Save a head that passes the target's states on with little change, and so is right now and then."""
    model = LLM(target, draft=None, dtype="float32").model
    size = model.config.hidden_size
    if kind == "eagle":
        head: Any = save_random_head(folder)
    else:
        head = save_random_eagle3(folder, draft_vocab_size=90)
        head.lm_head.weight.data = model.weights.lm_head_weight[head.draft_tokens].clone()
    layer = head.layers[0]
    for part in (layer.o_proj, layer.mlp.down_proj, head.fc):
        part.weight.data *= 0.1
    head.fc.weight.data[:, -size:] += torch.eye(size)
    KINDS[kind].save(head, folder, {})
    return folder


@pytest.fixture(scope="module", params=["eagle", "eagle3"])
def head(request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_echo(request.param, tmp_path_factory.mktemp(request.param), target)


@pytest.fixture(scope="module", params=list(SHAPES))
def llm(request: pytest.FixtureRequest, target: Path, head: Path) -> LLM:
    return LLM(target, head, dtype="float64", shape=SHAPES[request.param], adaptive_drafts=False)


def answered(llm: LLM, prompt: list[int], length: int) -> tuple[Sample, Any]:
    """Return a text with a greedy answer, and the speculation figures of that answer."""
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    text = prompt + output.token_ids
    return Sample(text, [i > len(prompt) for i in range(len(text))]), output.stats


def ranks_of(llm: LLM, sample: Sample, depth: int) -> torch.Tensor:
    assert isinstance(llm.engine.worker.drafter, ModelDrafter)
    head: Any = llm.engine.worker.drafter.head
    batch = OnlineFeatures(llm.model, [sample], head.taps).batch([0])
    return token_ranks(head, llm.engine.worker.drafter.readout, batch, depth)


prompts = st.lists(st.integers(5, VOCAB - 1), min_size=1, max_size=9)


@pytest.mark.long
@settings(max_examples=num_cases(10))
@given(prompt=prompts, length=st.integers(2, 24))
def test_ranks_foretell_every_step_of_the_engine(llm: LLM, prompt: list[int], length: int) -> None:
    """A step accepts tokens as long as the next one is among its candidates; then the next step begins."""
    sample, stats = answered(llm, prompt, length)
    shape = llm.config.shape
    ranks = ranks_of(llm, sample, shape.depth)
    assert ranks.shape == (shape.depth, length - 1)
    steps = place = 0
    while place < length - 1:
        accepts = [0 <= rank < shape.branching for rank in ranks[:, place].tolist()]
        place += [*accepts, False].index(False) + 1
        steps += 1
    assert stats.steps == steps


@pytest.mark.long
@settings(max_examples=num_cases(5))
@given(asked=st.lists(prompts, min_size=1, max_size=3), length=st.integers(1, 24))
def test_a_replay_takes_the_steps_of_the_engine(llm: LLM, asked: list[list[int]], length: int) -> None:
    assert replayed(llm, asked, length) == engine_steps(llm, asked, length)


@pytest.mark.long
@pytest.mark.parametrize("min_reach", [0.0, 0.3])
def test_a_replay_drafts_trees(target: Path, head: Path, min_reach: float) -> None:
    llm = LLM(target, head, dtype="float64", shape=DraftShape(4, 3, 8, min_reach), adaptive_drafts=False)
    asked = [[5 + i, 20 + i, 41] for i in range(12)]
    found = replayed(llm, asked, 24)
    assert found == engine_steps(llm, asked, 24)
    assert sum(stats.accepted_per_depth[0] for stats in found if stats.accepted_per_depth) > 3


def engine_steps(llm: LLM, asked: list[list[int]], length: int) -> list[SpeculationStats]:
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    # One by one: a step of several rows may have no room for all their trees.
    return [llm.generate([prompt], params, use_tqdm=False)[0].stats for prompt in asked]


def replayed(llm: LLM, asked: list[list[int]], length: int) -> list[SpeculationStats]:
    samples = [answered(llm, prompt, length)[0] for prompt in asked]
    head, readout = head_of(llm)
    source = OnlineFeatures(llm.model, samples, head.taps)
    answers = [KnownAnswer(source.batch([i]), len(prompt)) for i, prompt in enumerate(asked)]
    return replay(DraftModel(head, readout), answers, llm.config.shape, TORCH)


@pytest.mark.long
def test_the_heads_are_right_now_and_then(target: Path, head: Path) -> None:
    """Without which the test above would show little."""
    shape = SHAPES["chains of likeliest tokens"]
    found = measure_tau(target, head, [[5 + i, 20 + i, 41] for i in range(12)], 0.0, 24, shape, "float64")
    assert 0.05 < accepted_shares(found)[0] < 0.95
    assert len(found.accepted_per_depth) == shape.depth


@pytest.mark.long
@settings(max_examples=num_cases(10))
@given(prompt=prompts, length=st.integers(2, 12))
def test_ranks_are_those_of_training(llm: LLM, prompt: list[int], length: int) -> None:
    sample, _ = answered(llm, prompt, length)
    depth = llm.config.shape.depth
    ranks = ranks_of(llm, sample, depth)
    assert isinstance(llm.engine.worker.drafter, ModelDrafter)
    head: Any = llm.engine.worker.drafter.head
    options = LossSettings("ce", depth, 1.0, 1.0, 0.0, 0.0)
    kind = TRAINING_KINDS["eagle3" if head.taps else "eagle"]
    trainer = kind.trainer(head.module, llm.model.weights.lm_head_weight, options).double()
    with torch.no_grad():
        found = trainer(OnlineFeatures(llm.model, [sample], head.taps).batch([0]))
    # Training is not about tokens that the head cannot propose.
    assert found.count.tolist() == ((ranks != NO_TOKEN) & (ranks < VOCAB)).sum(1).tolist()
    torch.testing.assert_close(found.accuracy * found.count, (ranks == 0).sum(1).double())


def test_accuracy_is_of_the_tokens_that_the_engine_drafts(llm: LLM) -> None:
    """All but each answer's first, over all answers."""
    outputs = answer(llm, [[5 + i, 20 + i, 41] for i in range(8)], 0.0, 14)
    depth = llm.config.shape.depth
    samples = []
    for output in outputs:
        text = output.prompt_token_ids + output.token_ids
        samples.append(Sample(text, [i > len(output.prompt_token_ids) for i in range(len(text))]))
    ranks = torch.cat([ranks_of(llm, sample, depth) for sample in samples], 1)
    wanted = [[sum(0 <= rank < top for rank in of_depth) for top in (1, 2, 3)] for of_depth in ranks.tolist()]
    counts = [sum(rank != NO_TOKEN for rank in of_depth) for of_depth in ranks.tolist()]
    shares = [[hits / count for hits in row] for row, count in zip(wanted, counts, strict=True)]
    assert accuracy(llm, outputs, depth) == pytest.approx(torch.tensor(shares).numpy(), abs=1e-4)


def write(file: Path, *values: Any) -> str:
    file.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return str(file)


def one_kind(file: str, **settings: Any) -> EvaluateSettings:
    return EvaluateSettings(data=[file], out=Path("evaluation"), temperatures=(0.0,), **settings)


def chat(*contents: str) -> dict[str, Any]:
    """Turns of user and assistant."""
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]}


@pytest.mark.long
def test_the_command_reports_what_the_engine_does(
    target: Path, head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = write(tmp_path / "a.jsonl", *(chat(f"w{i} w3", "w1", "w2", "w4") for i in range(9)), {"messages": 3})
    long = write(tmp_path / "b.jsonl", *({"prompt": f"w{i} w{i + 1} w7 w8"} for i in range(5)))
    words = ["--model", str(target), "--draft", str(head), "--data", f"short={short}", f"long={long}", "--out"]
    words += [str(tmp_path / "out"), "--max-tokens", "20", "--dtype", "float64"]
    words += ["--depth", "3", "--branching", "4", "--nodes", "9", "--min-reach", "0", "--speed-prompts"]
    stages.run("evaluate", [*words, "2", "--temperatures", "0", "1"])
    printed = capsys.readouterr().out
    assert "no question         1" in printed  # what was left out
    found = Evaluation.read(tmp_path / "out" / "evaluation.json")
    assert [(row.domain, row.temperature, row.prompts) for row in found.measured] == [
        ("short", 0, 9),
        ("short", 1, 9),
        ("long", 0, 5),
        ("long", 1, 5),
    ]
    tokenizer = LLM(target, draft=None).tokenizer
    assert tokenizer is not None
    asked = [tokenizer.encode_chat([{"role": "user", "content": f"w{i} w3"}]) for i in range(9)]
    assert printed.count("9 nodes, depth 3") == 4
    for row in found.measured[:2]:
        wanted = measure_tau(target, head, asked, row.temperature, 20, DraftShape(3, 4, 9), "float64")
        assert (row.tau, row.tokens, row.steps) == (round(wanted.tau, 4), wanted.tokens, wanted.steps)
        assert row.accepted_per_depth == pytest.approx([*accepted_shares(wanted), 0, 0, 0][:3], abs=1e-4)
        assert f"{row.tau:.2f}" in printed
    for row in found.measured:
        assert row.tok_per_s is not None
        assert row.plain_tok_per_s is not None
        assert row.speedup == row.tok_per_s / row.plain_tok_per_s > 0
        assert f"{row.speedup:.2f}" in printed
    assert found.machine in printed
    for by_depth in found.accuracy.values():
        assert len(by_depth) == 3
        assert all(0 <= first <= second <= third <= 1 for first, second, third in by_depth)
    assert (tmp_path / "out" / "evaluation.png").stat().st_size > 1000
    # Accuracy is of the greedy answers, whatever temperatures are asked for.
    stages.run("evaluate", [*words, "0", "--temperatures", "0.7"])
    again = Evaluation.read(tmp_path / "out" / "evaluation.json")
    assert again.accuracy == found.accuracy
    assert again.measured[0].speedup is None


@pytest.mark.long
def test_speed_is_of_both_engines_in_turn(
    target: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a drafted answer takes 1 s, a plain one 3 s; the first of each warms up."""
    asked = []
    real = EngineContender.run

    def run(engine: EngineContender, prompts: Any, arrivals: Any = None) -> TimedRun:
        drafts = engine.llm.config.draft is not None
        asked.append(drafts)
        assert not drafts or engine.llm.config.shape == default_shape("cpu")
        assert engine.llm.config.scheduler.adaptive_drafts
        return replace(real(engine, prompts, arrivals), seconds=1.0 if drafts else 3.0)

    monkeypatch.setattr(EngineContender, "run", run)
    file = write(tmp_path / "a.jsonl", *({"prompt": f"w{i} w3"} for i in range(5)))
    own = one_kind(file, max_tokens=20, dtype="float64", speed_prompts=3)
    found = evaluate(target, head, {"a": file}, own, BadData(), None)
    assert asked == [False, True, True, False, False, True, True, False]
    assert found.measured[0].speedup == pytest.approx(3, rel=1e-3)
    # Tau besides, of the trees by which heads of runs are compared.
    assert [row.tree for row in found.measured] == [default_shape("cpu"), EAGLE2_SHAPE]
    assert [row.speedup is None for row in found.measured] == [False, True]
    assert found.measured[1].tau != found.measured[0].tau


@pytest.mark.long
def test_without_options_both_trees_are_measured_and_engines_leave_each_other_room(
    target: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU holds two engines at a time, and caches as long as the longest request."""
    lengths, is_open, most = [], set[int](), [0]
    begin, close = LLM.__init__, LLM.close

    def begins(llm: LLM, *args: Any, **settings: Any) -> None:
        begin(llm, *args, **settings)
        lengths.append(llm.max_model_len)
        is_open.add(id(llm))
        most[0] = max(most[0], len(is_open))

    def closes(llm: LLM) -> None:
        close(llm)
        is_open.remove(id(llm))

    file = write(tmp_path / "a.jsonl", {"prompt": "w1 w3"}, {"prompt": "w4 w5 w6 w7"})
    tokenizer = LLM(target, draft=None).tokenizer
    assert tokenizer is not None
    longest = len(tokenizer.encode_chat([{"role": "user", "content": "w4 w5 w6 w7"}])) + 9
    monkeypatch.setattr(LLM, "__init__", begins)
    monkeypatch.setattr(LLM, "close", closes)
    words = ["--model", target, "--draft", head, "--data", f"a={file}", "--out", tmp_path / "out"]
    stages.run("evaluate", [*words, "--max-tokens", 9, "--temperatures", 0, "--dtype", "float64"])
    found = Evaluation.read(tmp_path / "out" / "evaluation.json")
    assert [row.tree for row in found.measured] == [default_shape("cpu"), EAGLE2_SHAPE]
    assert lengths == [longest] * 4
    assert (most, is_open) == ([2], set())


@pytest.mark.long
def test_a_text_ends_where_the_heads_positions_do(target: Path, tmp_path: Path) -> None:
    short = tmp_path / "short"
    save_random_head(short, max_position_embeddings=24)
    file = write(tmp_path / "a.jsonl", *({"prompt": "w1 w2 w3"} for _ in range(3)))
    own = one_kind(file, max_tokens=40, dtype="float32", speed_prompts=0)
    found = evaluate(target, short, {"a": file}, own, BadData(), DraftShape(2, 2, 4))
    assert found.measured[0].prompts == 3


@pytest.mark.parametrize(
    ("value", "contents"),
    [
        (chat("a", "b", "c", "d"), ["a"]),
        (chat("a", "b", "c"), ["a", "b", "c"]),
        (chat("a"), ["a"]),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, ["a"]),
        ({"messages": [{"role": "system", "content": "s"}, *chat("a", "b")["messages"]]}, ["s", "a"]),
        ({"messages": [{"role": "user", "content": "a"}, *chat("b", "c")["messages"]]}, ["a", "b"]),
        ({"prompt": "a"}, ["a"]),
        ({"turns": ["a", "b"]}, ["a"]),
    ],
)
def test_a_question_is_what_stands_before_the_first_answer(value: object, contents: list[str]) -> None:
    assert [message["content"] for message in question(Entry(Place("x", 1), value))] == contents


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (3, "not a JSON object"),
        ({}, "no question"),
        ({"prompt": 3}, "no question"),
        ({"prompt": " "}, "empty content"),
        ({"turns": []}, "no question"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "no question"),
        ({"messages": [{"role": "judge", "content": "a"}]}, "unknown role"),
    ],
)
def test_prompts_that_ask_nothing_are_told(value: object, told: str) -> None:
    with pytest.raises(BadConversation, match=told):
        question(Entry(Place("x", 1), value))


def test_refusals_are_one_line_with_a_remedy(
    target: Path, head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write(tmp_path / "good.jsonl", {"prompt": "w1"})
    empty, bad = write(tmp_path / "empty.jsonl"), write(tmp_path / "bad.jsonl", {"messages": []})
    small, plain = tmp_path / "small", tmp_path / "plain"
    save_shallow_llama(small, save_random_llama(plain))
    base = {"--model": str(target), "--draft": str(head), "--data": f"a={good}", "--out": str(tmp_path / "out")}
    for changes, told in [
        ({"--data": good}, "give NAME=FILE"),
        ({"--data": "a=null_block_table.jsonl"}, "null_block_table.jsonl: cannot be read"),
        ({"--data": f"a={empty}"}, "empty.jsonl: no prompt that can be answered: there is nothing in it"),
        ({"--data": f"a={bad}"}, "bad.jsonl: no prompt that can be answered: line 1: no question"),
        ({"--draft": str(small)}, "small: not a draft head"),
        ({"--draft": "ngram"}, "ngram: no such folder"),
        ({"--model": str(plain)}, "plain: no chat template"),
        ({"--depth": "0"}, "depth is 0"),
        ({"--limit": "0"}, "limit is 0"),
        ({"--temperatures": "-1"}, "temperature is -1"),
        ({"--max-tokens": "300"}, "300 to come, of 256; lower max_tokens"),
    ]:
        words = [word for pair in {**base, **changes}.items() for word in pair]
        with pytest.raises(SystemExit) as ended:
            stages.run("evaluate", words)
        printed = capsys.readouterr().err
        assert (ended.value.code, told in printed, printed.count("\n")) == (2, True, 1), printed
    with pytest.raises(SystemExit):
        stages.run("evaluate", [*(word for pair in base.items() for word in pair), "--data", f"a={good}", f"a={good}"])
    assert "--data names a twice" in capsys.readouterr().err
    with pytest.raises(ValueError, match="not an evaluation"):
        Evaluation.read(Path(good))
    later = {"model": "m", "draft": "d", "dtype": "float32", "max_tokens": 1, "measured": [], "accuracy": {}}
    (tmp_path / "later.json").write_text(json.dumps(later))
    assert Evaluation.read(tmp_path / "later.json").model == "m"
    # Of a program that measures more: a card would leave it out in silence.
    (tmp_path / "later.json").write_text(json.dumps({**later, "measured_later": 1}))
    with pytest.raises(ValueError, match="not an evaluation"):
        Evaluation.read(tmp_path / "later.json")
    with pytest.raises(ValueError, match=r"cannot be read.*evaluation\.json"):
        Evaluation.read(tmp_path / "none.json")


@pytest.mark.long
def test_tau_is_that_of_prompts_one_by_one(target: Path, head: Path) -> None:
    """A step of many rows and large trees runs out of tokens, and drafts are cut first."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(6, VOCAB - 1, (40 + i,), generator=generator).tolist() for i in range(48)]
    shape = DraftShape(5, 8, 60)
    together = measure_tau(target, head, prompts, max_tokens=12, shape=shape, dtype="float64")
    alone = [measure_tau(target, head, [prompt], max_tokens=12, shape=shape, dtype="float64") for prompt in prompts[:4]]
    first = measure_tau(target, head, prompts[:4], max_tokens=12, shape=shape, dtype="float64")
    assert (sum(one.steps for one in alone), sum(one.tokens for one in alone)) == (first.steps, first.tokens)
    llm = LLM(target, head, dtype="float64", shape=shape, adaptive_drafts=False, max_num_seqs=1)
    steps = sum(output.stats.steps for output in answer(llm, prompts, 0.0, 12))
    assert together.steps == steps
