"""`specdec bench`, run in this process on tiny checkpoints."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from specdec import LLM, SamplingParams
from specdec.bench import comparison, environment, peers
from specdec.bench.figures import Spread, figures_of
from specdec.bench.mode import parse_modes
from specdec.bench.timed_run import EngineContender, TimedRun, TimedSample, run_rounds
from specdec.cli.app import main
from specdec.config import DEMO, EngineConfig
from specdec.core.outputs import SpeculationStats
from specdec.draft_heads.drafting.draft_shape import DraftShape
from tests import command_line
from tests.command_line import run_command, unset_variables
from tests.specdec.tiny_checkpoints import Tiny

pytestmark = pytest.mark.slow

SPEC_BENCH = [
    {"question_id": 1, "category": "writing", "turns": ["Hello there", "And more"]},
    {"question_id": 2, "category": "maths", "turns": ["One and one"]},
    {"question_id": 3, "category": "maths", "turns": ["Two and two"]},
]


class Result(command_line.Result):
    @property
    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.out)
        return document

    @property
    def modes(self) -> dict[str, dict[str, Any]]:
        return {mode["mode"]: mode for mode in self.document["modes"]}


Bench = Callable[..., Result]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    file = tmp_path / "question.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in SPEC_BENCH))
    return file


@pytest.fixture
def bench(tiny: Tiny, dataset: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Bench:
    """`specdec bench` with options that suit the tiny model behind the sub-command."""
    unset_variables(monkeypatch)

    def call(command: str, *args: object) -> Result:
        fixed = ["--model", tiny.target, "--dataset", dataset, "--dtype", "float64", "--device", "cpu"]
        if command != "acceptance":
            fixed += ["--rounds", 2, "--warmup-rounds", 0, "--fixed-drafts"]
        tree = ["--depth", 2, "--branching", 48, "--nodes", 64, "--max-tokens", 6, "--ignore-eos"]
        return Result(*run_command(capsys, "bench", command, *fixed, *tree, *args))

    return call


@pytest.mark.long
def test_latency_measures_all_modes_in_one_run(bench: Bench, tiny: Tiny) -> None:
    other = f"{tiny.head}:nodes=3,adaptive_drafts=on"
    result = bench("latency", "--draft", tiny.head, "--draft", other, "--draft", "ngram", "--json")
    assert (result.code, result.err) == (0, "")
    modes = result.modes
    assert list(modes) == ["plain", str(tiny.head), other, "ngram"]
    assert [mode["adaptive_drafts"] for mode in modes.values()] == [False, False, True, False]
    assert modes[other]["shape"]["nodes"] == 3
    for mode in modes.values():
        assert (mode["prompts"], mode["output_tokens"], mode["differing"]) == (3, 18, 0)
        assert len(mode["tok_per_s_by_round"]) == 2
        assert mode["tok_per_s"]["least"] <= mode["tok_per_s"]["median"] <= mode["tok_per_s"]["most"]
        assert mode["first_ms"]["least"] > 0 < mode["per_token_ms"]["least"]
        assert set(mode["categories"]) == {"writing", "maths"}
        assert mode["categories"]["maths"]["prompts"] == 2
        assert mode["categories"]["maths"]["speedup"]
    plain = modes["plain"]
    assert (plain["tau"], plain["accepted_per_depth"], plain["nodes_per_step"]) == (1, [], None)
    assert set(plain["speedup"].values()) == set(plain["cost"].values()) == {1}
    assert modes[str(tiny.head)]["nodes_per_step"] > 3
    assert 1 < modes[str(tiny.head)]["tau"] < 3


@pytest.mark.long
def test_figures_of_speculation_are_those_of_the_engine(bench: Bench, tiny: Tiny) -> None:
    """Tau and acceptance per depth, summed over the prompts."""
    (mode,) = (
        mode for name, mode in bench("acceptance", "--draft", tiny.head, "--json").modes.items() if name != "plain"
    )
    llm = LLM(
        tiny.target, tiny.head, dtype="float64", device="cpu", shape=DraftShape(2, 48, 64, 0.6), adaptive_drafts=False
    )
    messages = [[{"role": "user", "content": line["turns"][0]}] for line in SPEC_BENCH]  # type: ignore[index]
    total = SpeculationStats()
    for output in llm.chat(messages, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)):
        total.add(output.stats)
    assert mode["tau"] == total.tau
    assert mode["accepted_per_depth"] == [count / total.steps for count in total.accepted_per_depth]
    assert mode["nodes_per_step"] == total.drafted / total.steps
    assert "tok_per_s" not in mode


@pytest.mark.long
def test_modes_share_the_memory_of_a_gpu(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are loaded into one process, one after another; a mode's own setting counts as it is."""
    shares, real = [], comparison.resolved_config

    def watched(*args: Any) -> EngineConfig:
        config = real(*args)
        shares.append((config.gpu_memory_utilization, config.kv_cache_memory))
        return config

    monkeypatch.setattr(comparison, "resolved_config", watched)
    own = ("--draft", "ngram", "--draft", "ngram:gpu_memory_utilization=0.3")
    assert bench("acceptance", *own, "--gpu-memory-utilization", 0.6).code == 0
    assert shares == [(pytest.approx(0.2), None), (pytest.approx(0.4), None), (0.3, None)]
    shares.clear()
    assert bench("acceptance", "--draft", "ngram", "--kv-cache-memory", "64MiB").code == 0
    assert shares == [(0.9, 64 << 20)] * 2
    shares.clear()
    # A peer has what they leave.
    monkeypatch.setattr(comparison, "load_peer", Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        bench("latency", "--draft", "ngram", "--peer", "transformers")
    assert [share for share, _ in shares] == [pytest.approx(0.3), pytest.approx(0.6)]


@pytest.mark.parametrize(("drafts", "code"), [(("ngram", "org/head"), 0), (("ngram",), 2)])
def test_a_revision_is_that_of_the_modes_with_a_head(
    bench: Bench, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, drafts: tuple[str, ...], code: int
) -> None:
    revisions: list[Any] = []
    real = comparison.resolved_config

    def watched(model: Any, draft: Any, settings: dict[str, Any]) -> EngineConfig:
        revisions.append(settings.get("draft_revision"))
        if draft == "org/head":
            draft, settings = tiny.head, {**settings, "draft_revision": None}
        return real(model, draft, settings)

    monkeypatch.setattr(comparison, "resolved_config", watched)
    options = [part for draft in drafts for part in ("--draft", draft)]
    assert bench("acceptance", *options, "--draft-revision", "v2").code == code
    assert revisions == ([None, None, "v2"] if code == 0 else ["v2"])


def test_results_name_no_folder_of_this_machine_for_what_is_built_in() -> None:
    assert environment.shown_path(DEMO / "target") == "specdec/demo/target"
    assert environment.shown_path(Path("some/where")) == "some/where"


def test_bench_alone_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["bench"])
    assert exited.value.code == 0
    assert {"latency", "throughput", "acceptance"} <= set(capsys.readouterr().out.split())


@pytest.mark.parametrize(("variable", "modes"), [(None, ["plain"]), ("none", ["plain"]), ("ngram", ["plain", "ngram"])])
def test_modes_without_options(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, variable: str | None, modes: list[str]
) -> None:
    if variable is not None:
        monkeypatch.setenv("SPECDEC_DRAFT", variable)
    assert list(bench("acceptance", "--json").modes) == modes


@pytest.mark.long
def test_conversations_and_texts(bench: Bench, dataset: Path) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    lines: list[dict[str, Any]] = [
        {"prompt": "Hello"},
        {"conversation": turns},
        {"messages": turns, "category": "chat"},
    ]
    dataset.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (plain,) = bench("acceptance", "--json").modes.values()
    assert {name: one["prompts"] for name, one in plain["categories"].items()} == {"none": 2, "chat": 1}
    result = bench("acceptance", "--raw")
    assert (result.code, result.out) == (2, "")
    assert "line 2: messages need the chat template" in result.err


@pytest.mark.long
@pytest.mark.parametrize("rate", [(), ("--request-rate", 1000)])
def test_throughput_runs_the_prompts_together(bench: Bench, tiny: Tiny, rate: tuple[object, ...]) -> None:
    result = bench("throughput", "--draft", tiny.head, "--num-prompts", 1, "--json", *rate)
    assert result.code == 0
    for mode in result.modes.values():
        assert (mode["prompts"], mode["differing"]) == (2, 0)
        # Prompts that run together have no speed of their own.
        assert mode["categories"]["maths"]["speedup"] is None
        assert mode["speedup"]


@pytest.mark.long
def test_tables_and_files(bench: Bench, tiny: Tiny, tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    result = bench("latency", "--draft", tiny.head, "--output", output)
    assert (result.code, result.err) == (0, "")
    for words in ("speed-up", "depth 1", "writing", "0 of 3", "differ: prompts whose tokens", "Median (least–most)"):
        assert words in result.out
    document = json.loads(output.read_text())
    assert {"processor", "threads", "torch", "commit", "specdec", "model", "dataset", "rounds"} <= set(document)
    assert document["benchmark"] == "bench latency"


def test_a_file_that_cannot_be_written_in_the_end_costs_no_figures(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    result = bench("acceptance", "--draft", "ngram", "--output", tmp_path / "results.json", "--json")
    assert result.code == 2
    assert list(result.modes) == ["plain", "ngram"]
    assert result.err == f"specdec: --output {tmp_path}/results.json: cannot be written: No space left on device\n"


@pytest.mark.long
def test_sampled_tokens_are_compared_under_the_coupled_rule_alone(bench: Bench, tiny: Tiny) -> None:
    coupled, rejection = str(tiny.head), f"{tiny.head}:verify=rejection"
    modes = bench("acceptance", "--draft", coupled, "--draft", rejection, "--temperature", 1, "--json").modes
    assert (modes[coupled]["differing"], modes[rejection]["differing"]) == (0, None)


def test_differing_tokens_are_counted() -> None:
    def sample(*tokens: int) -> TimedSample:
        return TimedSample(list(tokens), 1.0, 2.0)

    plain = [TimedRun([sample(1, 2), sample(3, 4), sample(5)], 6.0)] * 2
    other = [plain[0], TimedRun([sample(1, 2), sample(3, 9), sample(5)], 3.0)]
    figures = figures_of(other, plain, range(3), alone=True, comparable=True)
    assert figures.differing == 1
    assert figures.speedup == Spread(1.5, 1.0, 2.0)
    assert figures_of(other, plain, range(3), alone=True, comparable=False).differing is None


def test_step_cost_is_the_ratio_of_step_times() -> None:
    plain = [TimedRun([TimedSample([1] * 9, 1.0, 9.0, SpeculationStats(8, 8))], 9.0)]
    other = [TimedRun([TimedSample([1] * 9, 1.0, 7.0, SpeculationStats(4, 8, [4], 12))], 7.0)]
    figures = figures_of(other, plain, [0], alone=True, comparable=True)
    assert figures.cost == Spread(1.5, 1.5, 1.5)
    assert (figures.tau, figures.nodes_per_step, figures.accepted_per_depth) == (2.0, 3.0, [1.0])
    assert figures.per_token_ms == Spread(750.0, 750.0, 750.0)


class _Scribe:
    """A contender that notes its runs."""

    def __init__(self, name: str, log: list[tuple[str, int]]) -> None:
        self.name, self.log = name, log

    def run(self, prompts: Sequence[list[int]], arrivals: Sequence[float] | None = None) -> TimedRun:  # noqa: ARG002
        self.log.append((self.name, prompts[0][0]))
        return TimedRun([TimedSample([0], 0.1, 0.1) for _ in prompts], 0.1)


def test_rounds_alternate() -> None:
    log: list[tuple[str, int]] = []
    contenders = {name: _Scribe(name, log) for name in "abc"}
    measured = run_rounds(contenders, [[[1]], [[2]]], rounds=1, warmup=1)
    forth, back = ["a", "b", "c"], ["c", "b", "a"]
    runs = [[name for name, _ in log[start : start + 3]] for start in range(0, 12, 3)]
    assert runs == [back, forth, forth, back]
    assert [prompt for _, prompt in log] == [1, 1, 1, 2, 2, 2] * 2
    assert {name: len(rounds) for name, rounds in measured.items()} == {"a": 1, "b": 1, "c": 1}
    assert len(measured["a"][0].samples) == 2


def test_interrupted_run_leaves_nothing_behind(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(tiny.target, draft=None, dtype="float64", device="cpu")
    contender = EngineContender(llm, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    steps = iter(range(3))
    real = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: real() if next(steps, None) is not None else interrupt())

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        contender.run([[5, 6, 7], [8, 9]])
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--draft", "ngram", "--draft", "ngram"], "--draft 'ngram' is given twice; leave one out"),
        (["--draft", "plain"], "--draft 'plain': plain decoding is always measured; leave it out"),
        (["--draft", ":nodes=3"], "--draft is ':nodes=3'; it must be eagle, ngram, suffix, or a folder"),
        (["--draft", "ngram:nodes"], "--draft 'ngram:nodes': 'nodes' is no setting of ngram; write KEY=VALUE"),
        (["--draft", "eagle:"], "--draft 'eagle:': '' is no setting of eagle; write KEY=VALUE, separated by commas"),
        (["--draft", "ngram:nodes=3,"], "--draft 'ngram:nodes=3,': '' is no setting; write KEY=VALUE"),
        (["--draft", "ngram:size=3"], "no setting is called 'size'; it must be one of depth, branching, nodes"),
        (["--draft", "ngram:nodes=many"], "nodes is 'many'; it must be a number"),
        (["--draft", "ngram:nodes=0"], "nodes is 0; it must be at least 1 and at most 1024"),
        (["--draft", "ngram:adaptive-drafts=perhaps"], "adaptive_drafts is 'perhaps'; it must be on or off"),
        (["--draft", "ngram:verify=best"], "verify is 'best'; it must be one of coupled, rejection"),
        (["--draft", "eagle"], "draft 'eagle' is the demo model's own head"),
        (["--rounds", 0], "rounds is 0; it must be at least 1"),
        (["--temperature", -1], "temperature is -1.0"),
        (["--dataset", "/no/such.jsonl"], "--dataset /no/such.jsonl: no such file"),
        (["--output", "results.txt"], "output is 'results.txt'; it must end with .json"),
        (["--output", "/no/such/results.json"], "--output /no/such/results.json: /no/such is no folder; create it"),
        (["--output", "/proc/results.json"], "--output /proc/results.json: cannot be written: "),
        (
            ["--peer", "sglang"],
            "--peer is 'sglang'; it must begin with one of transformers, llama-server, xllamacpp, openvino, vllm",
        ),
        (["--peer", "transformers:size=1"], "no setting is called 'size'; it must be one of batch, tokens"),
        (["--peer", "transformers:batch=0"], "batch is '0'; it must be a whole number of at least 1"),
        (["--peer", "transformers", "--temperature", 1], "temperature is 1; it must be 0 with --peer"),
    ],
)
def test_mistakes_are_told_in_one_line(bench: Bench, args: list[object], message: str) -> None:
    result = bench("latency", *args)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(("name", "package"), [("vllm", "vllm"), ("openvino", "openvino-genai")])
def test_missing_peer_is_told_in_one_line(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda _: None)
    result = bench("latency", "--peer", name)
    message = f"specdec: --peer {name!r}: {package} is not installed; run: pip install {package}\n"
    assert (result.code, result.out, result.err) == (2, "", message)


def test_peers_have_no_arrivals(bench: Bench) -> None:
    result = bench("throughput", "--peer", "transformers", "--request-rate", 3)
    assert (result.code, result.err) == (2, "specdec: --request-rate and --peer exclude each other; leave one out\n")


def test_long_prompt_ends_the_benchmark(bench: Bench) -> None:
    result = bench("latency", "--max-model-len", 10)
    assert (result.code, result.out) == (2, "")
    assert "maximum context length is 10 tokens" in result.err


def test_failed_prompt_ends_the_benchmark(tiny: Tiny) -> None:
    llm = LLM(tiny.target, draft=None, dtype="float64", device="cpu")
    nothing_allowed = SamplingParams(temperature=0, allowed_token_ids=[2], min_tokens=3)
    with pytest.raises(ValueError, match="the prompt of 2 tokens failed: no token can follow"):
        EngineContender(llm, nothing_allowed).run([[5, 6]])


@pytest.mark.long
def test_a_round_drafts_from_its_own_requests_alone(tiny: Tiny) -> None:
    prompts = [[5, 6, 7, 8, 9, 10], [11, 5, 6, 7, 8, 9, 10]]
    llm = LLM(tiny.target, "suffix", dtype="float64", device="cpu", adaptive_drafts=False)
    contender = EngineContender(llm, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    first, second = ([contender.run([prompt]).samples[0].stats for prompt in prompts] for _ in range(2))
    assert first == second
    # Without rounds, the engine knows the answer.
    llm.generate(prompts[:1], contender.params, use_tqdm=False)
    (again,) = llm.generate(prompts[:1], contender.params, use_tqdm=False)
    assert again.stats.tau > first[0].tau


def test_settings_of_a_mode() -> None:
    plain, mode, other = parse_modes(["a:b/c:nodes=3,min-reach=0.5,kv_cache_memory=9", "none:dtype=float32"])
    assert (plain.label, plain.draft) == ("plain", None)
    assert (mode.draft, mode.shape, mode.settings) == ("a:b/c", {"nodes": 3, "min_reach": 0.5}, {"kv_cache_memory": 9})
    assert (other.draft, other.settings) == (None, {"dtype": "float32"})


def test_commit_is_told_of_a_checkout_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package installed somewhere inside another project's repository has no commit of its own."""
    monkeypatch.setattr(environment, "PACKAGE", tmp_path)
    assert (environment.environment()["commit"], environment.environment()["uncommitted_changes"]) == (None, None)
    monkeypatch.setattr(environment.shutil, "which", lambda _: None)
    assert environment.environment("no-such-package")["commit"] is None
