"""`specdec generate` with requests that fail, bad input, and Ctrl-C."""

import io
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.command_line import Run
from tests.specdec.cli.generate_run import COMPARE_KEYS, KEYS, interrupt_after
from tests.specdec.tiny_checkpoints import CHARACTERS, Tiny


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


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
def test_interrupted_json_tells_what_was_aborted(
    run: Run, jsonl: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(monkeypatch, 5)
    result = run("--prompts", jsonl({"prompt": "Hi"}, {"prompt": "Bye"}), "--json")
    assert (result.code, result.err) == (130, "")
    assert [list(answer) for answer in result.objects] == [KEYS, KEYS]
    assert [answer["finish_reason"] for answer in result.objects] == ["abort", "abort"]
    assert all(answer["token_ids"] for answer in result.objects)


@pytest.mark.long
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
        (["hi", "--draft", "eagle"], "draft 'eagle'"),
        (["hi", "--model", "{tiny.bare}"], "{tiny.bare}: no tokenizer.json"),
        (["hi " * 200], "maximum context length is 256 tokens"),
        (["hi", "--temperature", "-1"], "temperature is -1.0"),
        (["hi", "--top-p", "0"], "top_p is 0.0"),
        (["hi", "--top-p", "1.5"], "top_p is 1.5"),
        (["hi", "--top-k", "-2"], "top_k is -2"),
        (["hi", "--max-tokens", "0"], "max_tokens is 0"),
        (["hi", "--seed", "-2"], "seed is -2"),
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
        (
            ["hi", "--verify", "unknown"],
            "verify is 'unknown'; it must be one of coupled, rejection, or come with a plugin",
        ),
        (["hi", "--plugin", "no.such_module"], "plugin 'no.such_module' cannot be imported: No module named 'no'"),
        (["hi", "--draft", "ngram", "--draft-option", "ngram"], "draft_options has 'ngram'; it must be SOURCE=VALUE"),
        (["hi", "--draft", "ngram", "--draft-option", "ngram=3"], "has ngram=3, and ngram has no option; leave it out"),
        (["hi", "--draft", "ngram", "--draft-option", "other=3"], "has other=3, and other does not draft; leave it"),
        (["hi", "--presence-penalty", "much"], "--presence-penalty"),
        (["hi", "--depth", "0"], "depth is 0"),
        (["hi", "--nodes", "9999"], "nodes is 9999"),
        (["hi", "--dtype", "int3"], "Invalid value for '--dtype': 'int3' is not one of 'auto'"),
        (["hi", "--device", "abacus"], "device 'abacus'"),
        (["hi", "--device", "meta"], "device 'meta' is not supported; use auto, cpu or cuda"),
        (["hi", "--device", "mps"], "device 'mps' is not supported"),
        (
            ["hi", "--kv-cache-memory", "1000000000000000"],
            "kv_cache_memory is 1000000000000000 (9.31e+05 GiB)",
        ),
        (["hi", "--min-tokens", "1" + 30 * "0"], "min_tokens is 1000"),
        (["hi", "--max-model-len", "1"], "max_model_len is 1; it must be at least 2"),
        (["a\udcff"], "the prompt is not valid text: its character 1 is"),
        (["hi", "--stop", "\udcff"], "stop is not valid text"),
        (["hi", "--bad-word", "\udcff"], "bad_words is not valid text"),
        (["hi", "--model", "\udcff"], "no such folder"),
        (["hi", "--verify", "\udcff"], "verify is '\\udcff'; it must be one of coupled"),
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


@pytest.mark.long
def test_a_prompt_that_the_engine_refuses_is_named_by_its_line(run: Run, jsonl: Callable[..., Path]) -> None:
    file = jsonl({"prompt": "fine"}, "", {"prompt": "hi " * 200})
    result = run("--prompts", file)
    assert (result.code, result.out) == (2, "")
    assert f"{file}, line 3: " in result.err
    assert "maximum context length is 256 tokens" in result.err
    assert result.err.count("\n") == 1


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
