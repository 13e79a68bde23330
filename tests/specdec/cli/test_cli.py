"""`specdec generate`, run in this process on a tiny checkpoint."""

import io
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.torch import load_file, save_file

from specdec import LLM, DraftShape, SamplingParams
from specdec.cli.app import main
from specdec.core.request import Request
from specdec.draft_heads.drafting.drafter import Proposal
from specdec.draft_heads.drafting.model_drafter import ModelDrafter
from specdec.engine.engine import LLMEngine
from specdec.verify.verifier import CoupledVerifier, WeighingVerifier
from tests.specdec.tiny_checkpoints import CHARACTERS, Tiny

FIGURES = ["steps", "tau", "accepted_per_depth", "seconds", "tok_per_s"]
KEYS = ["prompt", "text", "token_ids", "finish_reason", "error", *FIGURES]
COMPARE_KEYS = [*KEYS, "plain_tok_per_s", "speedup", "equal"]
GREEN = re.compile("\x1b\\[32m(.*?)\x1b\\[0m", re.DOTALL)


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def objects(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.out.splitlines()]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


Run = Callable[..., Result]


@pytest.fixture
def run(tiny: Tiny, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`specdec generate` with options that suit the tiny model in front of those given."""
    for name in ("SPECDEC_MODEL", "SPECDEC_DRAFT", "SPECDEC_LOG_LEVEL", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)

    monkeypatch.setattr("specdec.cli.compared_batches.LEAST_ROUNDS", 1)
    monkeypatch.setattr("specdec.cli.compared_batches.SECONDS", 0.0)

    def call(*args: object, stdin: io.StringIO | None = None) -> Result:
        monkeypatch.setattr(sys, "stdin", stdin or Terminal())
        fixed = ["--model", tiny.target, "--draft", tiny.head, "--dtype", "float64", "--device", "cpu"]
        tree = ["--depth", 2, "--branching", 48, "--nodes", 64, "--max-tokens", 24, "--ignore-eos", "--fixed-drafts"]
        with pytest.raises(SystemExit) as exited:
            main(["generate", *map(str, [*fixed, *tree, *args])])
        assert isinstance(exited.value.code, int)
        return Result(exited.value.code, *capsys.readouterr())

    return call


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Write a prompts file of these lines; what is no string becomes JSON."""

    def write(*lines: object) -> Path:
        file = tmp_path / "prompts.jsonl"
        file.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
        return file

    return write


def interrupt_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Press Ctrl-C in the step after `steps` steps."""
    real, taken = LLMEngine.step, 0

    def step(engine: LLMEngine) -> list[Request]:
        nonlocal taken
        taken += 1
        if taken > steps:
            raise KeyboardInterrupt
        return real(engine)

    monkeypatch.setattr(LLMEngine, "step", step)


def test_json_tells_what_the_library_tells(run: Run, tiny: Tiny) -> None:
    result = run("Hello", "--json")
    (answer,) = result.objects
    assert (result.code, result.err, list(answer)) == (0, "", KEYS)

    llm = LLM(tiny.target, draft=None, dtype="float64", device="cpu")
    tokens = llm.chat_prompt([{"role": "user", "content": "Hello"}])
    (plain,) = llm.generate(tokens, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    assert answer["prompt"] == "Hello"
    assert (answer["text"], answer["token_ids"]) == (plain.text, plain.token_ids)
    assert answer["finish_reason"] == "length"
    # The first token comes from the prompt's own pass.
    assert answer["tau"] == 23 / answer["steps"]  # type: ignore[operator]
    assert sum(answer["accepted_per_depth"]) > 0  # type: ignore[call-overload]


def test_streamed_text_is_the_text_of_json(run: Run) -> None:
    (answer,) = run("Hello", "--json").objects
    result = run("Hello")
    text, _, summary = result.out.rpartition("\n\n")
    assert (result.code, result.err) == (0, "")
    assert text == answer["text"]
    assert summary.startswith("24 tokens, ")
    assert f"; tau {answer['tau']:.2f}: " in summary


def test_figures_of_the_last_line_agree(run: Run, jsonl: Callable[..., Path]) -> None:
    for line in (run("Hello").out, run("--prompts", jsonl({"prompt": "Hi"}, {"prompt": "Bye"})).out):
        found = re.search(
            r"\n(\d+) tokens, [\d.]+ tok/s; tau ([\d.]+): (\d+) steps gave (\d+) tokens, (\d+) of them accepted "
            r"drafts, and the passes over prompts (\d+)\n$",
            line,
        )
        assert found is not None
        tokens, steps, given, accepted, first = (int(found[place]) for place in (1, 3, 4, 5, 6))
        assert tokens == given + first
        assert found[2] == f"{given / steps:.2f}"
        # Each step gives a token of the target's own, unless the output ends before it.
        assert given - steps <= accepted <= given
        assert first in (1, 2)


def test_a_terminal_shows_where_text_came_from(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (answer,) = run("Hello", "--json").objects
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    legend, coloured = run("Hello").out.split("\n\n", 1)
    coloured = coloured.rpartition("\n\n")[0].removesuffix("\x1b[2m")
    assert GREEN.findall(legend) == ["accepted from the draft"]
    assert GREEN.sub(r"\1", coloured) == answer["text"]
    assert len("".join(GREEN.findall(coloured))) == sum(answer["accepted_per_depth"])  # type: ignore[call-overload]
    assert GREEN.sub("", coloured)


def test_plain_decoding_accepts_nothing(run: Run) -> None:
    (answer,) = run("Hello", "--draft", "none", "--json").objects
    assert (answer["steps"], answer["tau"], answer["accepted_per_depth"]) == (23, 1.0, [])
    assert answer["token_ids"] == run("Hello", "--json").objects[0]["token_ids"]


@pytest.mark.parametrize("scored", [("--draft-vocab", 60, "--draft-rank", 8), ("--draft", "{tiny.target}")])
def test_drafts_of_other_kinds_change_no_token(run: Run, tiny: Tiny, scored: tuple[object, ...]) -> None:
    args = [str(arg).format(tiny=tiny) for arg in scored]
    (answer,) = run("Hello", "--compare", "--json", *args).objects
    assert answer["equal"] is True
    assert sum(answer["accepted_per_depth"]) > 0  # type: ignore[call-overload]


@pytest.mark.parametrize("sampling", [(), ("--temperature", 0.8), ("--temperature", 0.8, "--seed", 3)])
def test_comparison_finds_equal_tokens(run: Run, jsonl: Callable[..., Path], sampling: tuple[object, ...]) -> None:
    result = run("--prompts", jsonl({"prompt": "Hi"}, {"prompt": "Bye"}), "--compare", "--json", *sampling)
    assert (result.code, result.err) == (0, "")
    for answer in result.objects:
        assert list(answer) == COMPARE_KEYS
        assert answer["equal"] is True
        assert answer["speedup"] == answer["tok_per_s"] / answer["plain_tok_per_s"]  # type: ignore[operator]


def test_comparison_for_people(run: Run) -> None:
    result = run("Hello", "--compare")
    assert re.search(r"; without drafts [\d.]+ tok/s, speed-up [\d.]+x, tokens equal\n$", result.out)


def test_comparison_tells_unequal_tokens(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Request.append
    # Spoils the run without drafts only: a request is told by whether its drafts were ever accepted.
    monkeypatch.setattr(
        Request,
        "append",
        lambda request, token, accepted: real(
            request, token if any(request.accepted) or request.num_output < 20 else 5, accepted
        ),
    )
    (answer,) = run("Hello", "--compare", "--json").objects
    assert answer["equal"] is False
    assert run("Hello", "--compare").out.endswith("tokens differ in 1 of 1\n")


@pytest.mark.parametrize("argument", [(), ("-",)])
def test_prompt_from_standard_input(run: Run, argument: tuple[str, ...]) -> None:
    (answer,) = run(*argument, "--json", stdin=io.StringIO("Hello\n")).objects
    assert answer["prompt"] == "Hello"
    assert answer["text"] == run("Hello", "--json").objects[0]["text"]


def test_every_kind_of_line_in_a_prompts_file(run: Run, jsonl: Callable[..., Path]) -> None:
    long = "The first is longer than the others, so that it ends its prompt last. " * 2
    conversation = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    file = jsonl({"prompt": long}, "", {"turns": ["Hello", "and more"]}, {"messages": conversation})
    result = run("--prompts", file, "--json")
    assert [answer["prompt"] for answer in result.objects] == [long, "Hello", "Yes?"]
    texts = [answer["text"] for answer in result.objects]
    assert texts[:2] == [run(prompt, "--json").objects[0]["text"] for prompt in (long, "Hello")]

    blocks = re.split(r"(?:^|\n\n)\[\d/3\] .*\n", run("--prompts", file).out.rpartition("\n\n")[0])
    assert blocks[1:] == texts


def test_raw_leaves_the_chat_template_out(run: Run, tiny: Tiny) -> None:
    llm = LLM(tiny.target, draft=None, dtype="float64", device="cpu")
    (plain,) = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    (raw,) = run("Hello", "--raw", "--json").objects
    (chat,) = run("Hello", "--json").objects
    assert raw["token_ids"] == plain.token_ids
    assert raw["token_ids"] != chat["token_ids"]


def test_text_ends_before_a_stop_string(run: Run) -> None:
    text = str(run("Hello", "--json").objects[0]["text"])
    stop, other = text[7:9], "never comes"
    (answer,) = run("Hello", "--json", "--stop", stop, "--stop", other).objects
    assert answer["text"] == text[: text.index(stop)]
    assert answer["finish_reason"] == "stop"
    assert run("Hello", "--stop", stop).out.startswith(f"{answer['text']}\n\n")


def test_seed_decides_the_text(run: Run) -> None:
    texts = [run("Hello", "--json", "--temperature", 1, "--seed", seed).objects[0]["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("args", "changed"),
    [
        ((), {}),
        (("--temperature", 0.5, "--min-p", 0.3), {"temperature": 0.5, "min_p": 0.3}),
        (("--repetition-penalty", 1.3), {"repetition_penalty": 1.3}),
        (("--presence-penalty", 1.5), {"presence_penalty": 1.5}),
        (("--frequency-penalty", -0.5), {"frequency_penalty": -0.5}),
        (("--min-tokens", 3), {"min_tokens": 3}),
        (("--bad-word", "e", "--bad-word", "th"), {"bad_words": ["e", "th"]}),
        (("--top-k", -1, "--top-p", 0.5, "--seed", 4), {"top_k": -1, "top_p": 0.5, "seed": 4}),
    ],
)
def test_sampling_options_reach_the_request(
    run: Run, monkeypatch: pytest.MonkeyPatch, args: tuple[object, ...], changed: dict[str, object]
) -> None:
    seen: list[Request] = []
    real = LLMEngine.add_request
    monkeypatch.setattr(LLMEngine, "add_request", lambda engine, one: (seen.append(one), real(engine, one))[1])
    assert run("Hello", *args).code == 0
    (request,) = seen
    defaults: dict[str, object] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    assert request.params == SamplingParams(**{**defaults, **changed})  # type: ignore[arg-type]


def test_bad_words_do_not_come(run: Run) -> None:
    free = str(run("Hello", "--json").objects[0]["text"])
    (answer,) = run("Hello", "--json", "--bad-word", free[0], "--bad-word", free[3:5]).objects
    assert free[0] not in str(answer["text"])
    assert free[3:5] not in str(answer["text"])


def test_nothing_ends_the_output_before_its_least_length(run: Run) -> None:
    text = str(run("Hello", "--json").objects[0]["text"])
    (short,) = run("Hello", "--json", "--stop", text[2]).objects
    (long,) = run("Hello", "--json", "--stop", text[2], "--min-tokens", 10).objects
    assert len(short["token_ids"]) <= 3  # type: ignore[arg-type]
    assert len(long["token_ids"]) > 10  # type: ignore[arg-type]
    assert str(long["text"]).startswith(text[:10])


@pytest.mark.parametrize(
    ("args", "verifier", "proposal", "shape"),
    [
        ((), CoupledVerifier, Proposal.COUPLED, DraftShape(2, 48, 64, 0.6)),
        (("--verify", "coupled", "--min-reach", 0), CoupledVerifier, Proposal.COUPLED, DraftShape(2, 48, 64)),
        (("--verify", "rejection"), "rejection_walk", Proposal.DRAWN, DraftShape(2, 48, 64, 0.6)),
        (("--verify", "block", "--depth", 5), "block_walk", Proposal.DRAWN, DraftShape(5, 1, 5, 0.6)),
        (("--min-reach", 0.25, "--nodes", 7), CoupledVerifier, Proposal.COUPLED, DraftShape(2, 48, 7, 0.25)),
    ],
)
def test_acceptance_rule_and_tree_reach_the_engine(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    args: tuple[object, ...],
    verifier: object,
    proposal: Proposal,
    shape: DraftShape,
) -> None:
    engines: list[LLMEngine] = []
    real = LLMEngine.step
    monkeypatch.setattr(LLMEngine, "step", lambda engine: (engines.append(engine), real(engine))[1])
    result = run("Hello", "--json", "--temperature", 1, "--seed", 1, *args)
    assert (result.code, len(result.objects[0]["token_ids"])) == (0, 24)  # type: ignore[arg-type]
    engine = engines[-1]
    drafter = engine.worker.drafter
    assert isinstance(drafter, ModelDrafter)
    assert (drafter.proposal, drafter.shape) == (proposal, shape)
    if isinstance(engine.worker.verifier, WeighingVerifier):
        assert engine.worker.verifier.walk is getattr(engine.worker.cache.kernels, str(verifier))
    else:
        assert type(engine.worker.verifier) is verifier


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_greedy_text_is_the_same_under_every_rule(run: Run, rule: str) -> None:
    (expected,) = run("Hello", "--json").objects
    (answer,) = run("Hello", "--json", "--verify", rule).objects
    assert answer["token_ids"] == expected["token_ids"]


@pytest.fixture
def spoilt(tiny: Tiny, tmp_path: Path) -> Path:
    """The tiny target, but whatever has read a "~" is NaN."""
    folder = tmp_path / "spoilt"
    shutil.copytree(tiny.target, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][3 + CHARACTERS.index("~")] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


FAILED = (
    "no token can follow: the model's logits are not finite, or structured_outputs, allowed_token_ids, bad_words and "
    "min_tokens together forbid every token"
)


@pytest.mark.parametrize("as_json", [True, False])
def test_a_failed_request_is_told_of(run: Run, spoilt: Path, as_json: bool) -> None:
    result = run("~", "--model", spoilt, *(["--json"] if as_json else []))
    assert (result.code, result.err) == (1, f"specdec: 1 of 1 failed: {FAILED}\n")
    if as_json:
        (answer,) = result.objects
        assert (list(answer), answer["text"], answer["token_ids"]) == (KEYS, "", [])
        assert (answer["finish_reason"], answer["error"], answer["tau"]) == ("error", FAILED, 0.0)
    else:
        assert result.out.startswith("\n\n0 tokens, ")


def test_a_failed_request_does_not_keep_others_back(run: Run, spoilt: Path, jsonl: Callable[..., Path]) -> None:
    # No drafts, as they may hold the token that yields NaN.
    options = ["--model", spoilt, "--draft", "none", "--json", "--max-tokens", 5]
    result = run("--prompts", jsonl({"prompt": "Hi"}, {"prompt": "a~b"}, {"prompt": "~"}, {"prompt": "Bye"}), *options)
    assert (result.code, result.err) == (1, f"specdec: 2 of 4 failed: {FAILED}\n")
    assert [answer["finish_reason"] for answer in result.objects] == ["length", "error", "error", "length"]
    assert [answer["error"] for answer in result.objects] == [None, FAILED, FAILED, None]
    for prompt, answer in zip(("Hi", "Bye"), result.objects[::3], strict=True):
        (alone,) = run(prompt, *options).objects
        assert alone["token_ids"] == answer["token_ids"]
        assert len(alone["token_ids"]) == 5  # type: ignore[arg-type]


def test_interrupted_text_stays(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    text = str(run("Hello", "--json").objects[0]["text"])
    interrupt_after(monkeypatch, 5)
    result = run("Hello")
    shown, _, summary = result.out.rpartition("\n\n")
    assert (result.code, result.err) == (130, "")
    assert 5 <= len(shown) < len(text)
    assert text.startswith(shown)
    assert summary.startswith(f"{len(shown)} tokens, ")
    assert summary.endswith(", interrupted\n")


def test_interrupted_json_tells_what_was_aborted(
    run: Run, jsonl: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(monkeypatch, 5)
    result = run("--prompts", jsonl({"prompt": "Hi"}, {"prompt": "Bye"}), "--json")
    assert (result.code, result.err) == (130, "")
    assert [list(answer) for answer in result.objects] == [KEYS, KEYS]
    assert [answer["finish_reason"] for answer in result.objects] == ["abort", "abort"]
    assert all(answer["token_ids"] for answer in result.objects)


def test_interrupted_comparison_keeps_the_first_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (answer,) = run("Hello", "--json").objects
    warm_up = 8 + 8
    interrupt_after(monkeypatch, warm_up + int(str(answer["steps"])) + 1)
    result = run("Hello", "--compare", "--json")
    (compared,) = result.objects
    assert result.code == 130
    assert (list(compared), compared["text"]) == (COMPARE_KEYS, answer["text"])
    assert [compared[key] for key in COMPARE_KEYS[len(KEYS) :]] == [None, None, None]


def test_interrupted_before_any_output(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_after(monkeypatch, 0)
    (answer,) = run("Hello", "--json").objects
    assert (answer["text"], answer["token_ids"], answer["finish_reason"]) == ("", [], "abort")


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["hi", "--model", "/no/such"], "/no/such: no such folder"),
        (["hi", "--model", "{tmp}"], "{tmp}: not a checkpoint"),
        (["hi", "--draft", "/no/such"], "/no/such: no such folder"),
        (["hi", "--draft", "{tiny.wide_head}"], "{tiny.wide_head}"),
        (["hi", "--draft-vocab", "0"], "draft_vocab is 0; it must be from 1 to 100, as many as are scored"),
        (["hi", "--draft-vocab", "101"], "draft_vocab is 101; it must be from 1 to 100"),
        (["hi", "--draft-vocab", "/no/map.pt"], "draft_vocab '/no/map.pt' is neither a number nor a file"),
        (["hi", "--draft-rank", "33"], "draft_rank is 33; it must be from 1 to 32, the size of the states it reads"),
        (["hi", "--draft", "ngram", "--draft-rank", "8"], "draft 'ngram' has none; leave them out"),
        (["hi", "--draft", "eagle"], "draft 'eagle'"),
        (["hi", "--model", "{tiny.bare}"], "{tiny.bare}: no tokenizer.json"),
        (["hi " * 200], "the context is 256"),
        (["hi", "--temperature", "-1"], "temperature is -1.0"),
        (["hi", "--top-p", "0"], "top_p is 0.0"),
        (["hi", "--top-p", "1.5"], "top_p is 1.5"),
        (["hi", "--top-k", "-2"], "top_k is -2"),
        (["hi", "--max-tokens", "0"], "max_tokens is 0"),
        (["hi", "--seed", "-1"], "seed is -1"),
        (["hi", "--stop", ""], "stop holds an empty string"),
        (["hi", "--min-p", "-0.1"], "min_p is -0.1; it must be at least 0 and at most 1"),
        (["hi", "--min-p", "nan"], "min_p is nan"),
        (["hi", "--repetition-penalty", "0"], "repetition_penalty is 0.0; it must be above 0"),
        (["hi", "--presence-penalty", "2.5"], "presence_penalty is 2.5; it must be at least -2 and at most 2"),
        (["hi", "--frequency-penalty", "-2.5"], "frequency_penalty is -2.5; it must be at least -2 and at most 2"),
        (["hi", "--min-tokens", "-1"], "min_tokens is -1; it must be 0 or more"),
        (["hi", "--min-tokens", "25"], "min_tokens is 25; it must be at most max_tokens, 24"),
        (["hi", "--bad-word", "ok", "--bad-word", " "], "bad_words is ['ok', ' ']"),
        (["hi", "--min-reach", "1"], "min_reach is 1.0; it must be at least 0 and below 1"),
        (["hi", "--min-reach", "nan"], "min_reach is nan"),
        (["hi", "--verify", "unknown"], "'unknown' is not one of 'coupled', 'rejection', 'block'"),
        (["hi", "--presence-penalty", "much"], "--presence-penalty"),
        (["hi", "--depth", "0"], "depth is 0"),
        (["hi", "--nodes", "9999"], "nodes is 9999"),
        (["hi", "--dtype", "int3"], "Invalid value for '--dtype': 'int3' is not one of 'auto'"),
        (["hi", "--device", "abacus"], "device 'abacus'"),
        (["hi", "--device", "meta"], "device 'meta' is not supported; use auto, cpu or cuda"),
        (["hi", "--device", "mps"], "device 'mps' is not supported"),
        (["hi", "--swap-space", "1e9"], "swap_space is 1e+09 GiB; this machine has"),
        (["hi", "--min-tokens", "1" + 30 * "0"], "min_tokens is 1000"),
        (["hi", "--max-model-len", "1"], "max_model_len is 1; it must be at least 2"),
        (["a\udcff"], "the prompt is not valid text: its character 1 is"),
        (["hi", "--stop", "\udcff"], "stop is not valid text"),
        (["hi", "--bad-word", "\udcff"], "bad_words is not valid text"),
        (["hi", "--model", "\udcff"], "no such folder"),
        (["hi", "--verify", "\udcff"], "'\\udcff' is not one of 'coupled'"),
        (["hi", "--colour"], "--colour"),
        (["hi", "--max-tokens", "many"], "--max-tokens"),
        (["hi", "there"], "there"),
        (["hi", "--compare", "--draft", "none"], "--compare with --draft none"),
        (["  "], "the prompt '  ' is empty"),
        ([], "no prompt"),
        (["hi", "--prompts", "/no/file"], "the prompt 'hi' and --prompts /no/file"),
        (["--prompts", "/no/file"], "/no/file: no such file"),
        (["--prompts", "{tmp}"], "{tmp}: cannot be read"),
    ],
)
def test_bad_input_is_one_line(run: Run, tiny: Tiny, tmp_path: Path, args: list[str], named: str) -> None:
    result = run(*(arg.format(tmp=tmp_path, tiny=tiny) for arg in args))
    assert (result.code, result.out) == (2, "")
    assert re.fullmatch("specdec: .*\n", result.err)
    assert named.format(tmp=tmp_path, tiny=tiny) in result.err


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{'prompt': 1}", "line 2: not valid JSON"),
        ([1], "line 2: not a JSON object"),
        ({"text": "Hi"}, "line 2: neither prompt nor messages nor turns"),
        ({"prompt": ""}, "line 2: the prompt is empty"),
        ({"prompt": 7}, "line 2: prompt is 7"),
        ({"prompt": "a\ud800"}, "line 2: the prompt is not valid text: its character 1 is half of a pair"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "line 2: the prompt is not valid text"),
        pytest.param("[" * 200_000, "line 2: not a prompt: brackets nested too deeply", id="deep"),
        ({"turns": []}, "line 2: turns is []"),
        ({"messages": []}, "line 2: messages is []"),
        ({"messages": [{"role": "user"}]}, "line 2: message {'role': 'user'}"),
    ],
)
def test_bad_line_is_named(run: Run, jsonl: Callable[..., Path], line: object, named: str) -> None:
    file = jsonl({"prompt": "fine"}, line)
    # The model is not looked at before the file is in order.
    result = run("--prompts", file, "--model", "/no/such")
    assert (result.code, result.out) == (2, "")
    assert re.fullmatch("specdec: .*\n", result.err)
    assert f"{file}, {named}" in result.err


def test_empty_prompts_file(run: Run, jsonl: Callable[..., Path]) -> None:
    file = jsonl("", "")
    result = run("--prompts", file)
    assert (result.code, result.err) == (
        2,
        f"specdec: --prompts {file}: the file is empty; give one JSON object a line\n",
    )


def test_raw_refuses_a_conversation(run: Run, jsonl: Callable[..., Path]) -> None:
    result = run("--raw", "--prompts", jsonl({"messages": [{"role": "user", "content": "Hi"}]}))
    assert result.code == 2
    assert "line 1: messages need the chat template" in result.err


def test_empty_standard_input(run: Run) -> None:
    result = run(stdin=io.StringIO("\n"))
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("specdec: standard input is empty")


def test_environment_names_the_checkpoints(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_MODEL", str(tiny.target))
    monkeypatch.setenv("SPECDEC_DRAFT", str(tiny.head))
    with pytest.raises(SystemExit) as exited:
        main(["generate", "Hello", "--max-tokens", "3", "--json"])
    assert exited.value.code == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "Hello"


def test_help_and_mistakes_do_not_wait_for_torch() -> None:
    code = """
import sys
from specdec.cli.app import main
for args, expected in ((["generate", "--help"], 0), (["--version"], 0), (["generate", "x", "--top-p", "2"], 2)):
    try:
        main(args)
    except SystemExit as exited:
        assert exited.code == expected, exited.code
    assert "torch" not in sys.modules, args
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_verbose_tells_what_is_loaded(run: Run, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    told = run("Hello", "--verbose", "--json")
    for pattern in (
        rf"target {re.escape(str(tiny.target))}: [\d,]+ parameters, float64 on cpu, torch kernels, loaded in [\d.]+ s",
        rf"{re.escape(str(tiny.head))}: EAGLE-1/2 in the layout of official EAGLE$",
        r"measuring step costs$",
        rf"drafts: {re.escape(str(tiny.head))}, trees of at most \d+ nodes, depth 2, branching \d+",
        r"cache: \d+ tokens in \d+ blocks of 16, [\d.]+ MiB",
        r"step costs measured in [\d.]+ s: plain step [\d.]+ ms",
        r"ready after [\d.]+ s",
    ):
        assert re.search(rf"^specdec: INFO: {pattern}", told.err, re.MULTILINE), pattern
    assert run("Hello", "--json").err == ""
    monkeypatch.setenv("SPECDEC_LOG_LEVEL", "info")
    assert "specdec: INFO: ready after" in run("Hello", "--json").err
    monkeypatch.setenv("SPECDEC_LOG_LEVEL", "loud")
    assert run("Hello").err == (
        "specdec: SPECDEC_LOG_LEVEL is 'LOUD'; it must be one of debug, info, warning, error, critical\n"
    )


@pytest.fixture
def heeded_sigint() -> Iterator[None]:
    """Python's own handler of SIGINT: a shell starts background jobs with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded_sigint")
@pytest.mark.parametrize("error", [KeyboardInterrupt, ImportError, ValueError])
def test_ctrl_c_exits_with_130_whatever_becomes_of_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """A library may turn the interrupt into an error of its own, as imports of extension modules do."""

    def read(*_: object, **__: object) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise error("the tokenizer cannot be read") from None

    monkeypatch.setattr("specdec.cli.generate.read_prompts", read)
    assert run("hi") == (130, "", "")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_while_the_command_line_is_imported() -> None:
    code = """
import builtins, sys
real = builtins.__import__
def imports(name, *args, **kwargs):
    if name == "typer":
        raise KeyboardInterrupt
    return real(name, *args, **kwargs)
builtins.__import__ = imports
from specdec.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_module_runs_as_the_console_script_does() -> None:
    done = subprocess.run([sys.executable, "-m", "specdec", "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"specdec \d+\.\d+\.\d+\n", done.stdout)
