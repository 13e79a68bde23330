"""`specdec chat`, run in this process on a tiny checkpoint, and its drawings of draft trees."""

import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest
from prompt_toolkit.output import DummyOutput

from specdec import LLM, SamplingParams
from specdec.cli.chat_commands import COMMANDS
from specdec.cli.conversation import Conversation
from specdec.cli.screen import Screen, draw_tree, token_text
from specdec.core.outputs import TreeTrace
from specdec.core.request import Request
from specdec.engine.engine import LLMEngine
from tests.command_line import Result, run_command, unset_variables
from tests.specdec.thinking_chain import TEXT, THOUGHT, save_thinking_chain
from tests.specdec.tiny_checkpoints import Tiny

pytestmark = pytest.mark.slow

LENGTH = 12
GREEN = re.compile("\x1b\\[32m(.*?)\x1b\\[0m", re.DOTALL)
NO_TREE = (
    "specdec: the last answer has no draft tree; steps draft nothing without a draft (--draft, /draft on), or where "
    "plain steps are faster (unless --fixed-drafts)\n"
)


CTRL_C, CTRL_D = "\x03", "\x04"
Chat = Callable[..., Result]


@contextmanager
def terminal(typed: bytes) -> Iterator[TextIO]:
    """Yield standard input of a terminal at which this has been typed."""
    keyboard, own = pty.openpty()
    # The keys of a terminal that a program edits lines on. Otherwise Ctrl-C would be lost before the program reads it.
    tty.setraw(own)
    os.write(keyboard, typed)
    with os.fdopen(own, encoding="utf-8") as stdin:
        yield stdin
    os.close(keyboard)


@pytest.fixture
def chat(tiny: Tiny, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Chat:
    """`specdec chat` with these lines of input, piped or typed, and with options that suit the tiny model.

    The output lacks prompts and what is typed.
    """
    monkeypatch.setattr("specdec.cli.chat_loop.create_output", lambda **_: DummyOutput())
    unset_variables(monkeypatch)

    def call(*lines: str, options: tuple[object, ...] = (), typed: bool = False) -> Result:
        if typed:
            keys = "".join(line if line == CTRL_C else f"{line}\r" for line in lines) + CTRL_D
            with terminal(keys.encode(errors="surrogateescape")) as stdin:
                return run(stdin, options)
        return run(io.StringIO("".join(f"{line}\n" for line in lines)), options)

    def run(stdin: TextIO, options: tuple[object, ...]) -> Result:
        monkeypatch.setattr(sys, "stdin", stdin)
        fixed = ["--model", tiny.target, "--draft", tiny.head, "--dtype", "float64", "--device", "cpu"]
        tree = ["--depth", 2, "--branching", 48, "--nodes", 64, "--fixed-drafts", "--prefill-stretch", 0]
        fixed += ["--block-size", 8]
        return run_command(capsys, "chat", *fixed, *tree, "--max-tokens", LENGTH, "--ignore-eos", *options)

    return call


class Expected:
    """Answers of the tiny model by the library, without drafts."""

    def __init__(self, tiny: Tiny) -> None:
        self._llm = LLM(tiny.target, draft=None, dtype="float64", device="cpu", prefill_stretch=0)

    def answer(self, *said: str, system: str = "", **params: object) -> str:
        """Return the answer to the last of these messages, which take turns between user and assistant."""
        messages = [{"role": "system", "content": system}] if system else []
        messages += [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(said)]
        own = SamplingParams(**{"temperature": 0, "max_tokens": LENGTH, "ignore_eos": True, **params})  # type: ignore[arg-type]
        return self._llm.chat(messages, own)[0].text


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> Expected:
    return Expected(tiny)


@pytest.mark.long
def test_piped_input_gets_an_answer_for_each_line(chat: Chat, expected: Expected) -> None:
    first = expected.answer("Hello")
    second = expected.answer("Hello", first, "and then?")
    result = chat("Hello", "", "and then?")
    assert result == (0, f"{first}\n{second}\n", "")


@pytest.mark.long
def test_piped_input_has_no_colours(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = chat("Hello", "/tree").out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert chat("Hello", "/tree").out == plain
    assert "\x1b" not in plain


@pytest.mark.long
def test_a_terminal_shows_prompts_and_colours(chat: Chat, expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    result = chat("Hello", typed=True, options=("--max-tokens", 30))
    legend, shown = result.out.split("the chat.\n\n", 1)
    assert (result.code, result.err) == (0, "")
    assert GREEN.findall(legend) == ["accepted from the draft"]
    assert "Ctrl-C ends an answer, Ctrl-D " in legend
    assert GREEN.search(shown)
    assert GREEN.sub(r"\1", shown).removeprefix("\x1b[0m").startswith(f"{expected.answer('Hello', max_tokens=30)}\n")


@pytest.mark.long
def test_a_conversation_comes_from_the_prefix_cache(chat: Chat) -> None:
    def cached(*lines: str) -> list[int]:
        (line,) = re.findall(r"^prefix cache +(\d+) of (\d+) prompt tokens$", chat(*lines, "/stats").out, re.MULTILINE)
        return [int(number) for number in line]

    assert cached("Hello")[0] == 0
    hits, _ = cached("Hello", "and then?")
    # "user: Hello\nassistant: " and the answer, in whole blocks of 8 tokens.
    assert 16 <= hits <= 24 + LENGTH


@pytest.mark.long
def test_seed_of_the_next_answers(chat: Chat, expected: Expected) -> None:
    drawn = [expected.answer("Hello", temperature=1, seed=seed) for seed in (5, 6)]
    lines = ["/seed 5", "Hello", "/reset", "/seed 6", "Hello", "/reset", "/seed", "Hello"]
    out, seeded = chat(*lines, options=("--temperature", 1)).out, "".join(f"{text}\n" for text in drawn)
    assert out.startswith(seeded)
    assert out.removeprefix(seeded).removesuffix("\n") not in drawn


@pytest.mark.long
def test_drafts_off_and_on(chat: Chat, expected: Expected) -> None:
    said = ["Hello"]
    for line in ("and then?", "Bye"):
        said += [expected.answer(*said), line]
    lines = ["/draft off", "Hello", "/stats", "/draft on", "and then?", "/tree", "/draft off", "Bye", "/tree"]
    result = chat(*lines)
    assert (result.code, result.err) == (1, NO_TREE)
    first, *stats = result.out.splitlines()[:7]
    second, found, *_, third = result.out.splitlines()[7:]
    assert [first, second, third] == [said[1], said[3], expected.answer(*said)]
    assert re.search(r"; tau 1.00: \d+ tokens in \d+ steps, 0 of them drafted, ", stats[0])
    assert stats[4].startswith("draft ")
    assert stats[4].endswith(", off")
    assert found.endswith(" draft tokens accepted")


def test_drafts_cannot_be_turned_on_where_there_are_none(chat: Chat) -> None:
    result = chat("/draft on", options=("--draft", "none"))
    assert result == (1, "", "specdec: this chat has no draft; start it with --draft\n")


def test_reset_forgets_what_was_said(chat: Chat, expected: Expected) -> None:
    first = expected.answer("Hello")
    assert chat("Hello", "/reset", "Hello").out == f"{first}\n{first}\n"


@pytest.mark.long
def test_system_message(chat: Chat, expected: Expected) -> None:
    short, none = expected.answer("Hello", system="Be short."), expected.answer("Hello")
    assert short != none
    lines = ["Hello", "/reset", "/system", "Hello", "/reset", "/system  Be short. ", "Hello"]
    assert chat(*lines, options=("--system", "Be short.")).out == f"{short}\n{none}\n{short}\n"


def test_a_line_after_a_space_is_no_command(chat: Chat, expected: Expected) -> None:
    assert chat(" /reset").out == f"{expected.answer('/reset')}\n"


def test_exit_ends_the_chat(chat: Chat, expected: Expected) -> None:
    assert chat("Hello", "/exit", "Hello") == (0, f"{expected.answer('Hello')}\n", "")


def test_help_lists_all_commands(chat: Chat) -> None:
    assert [line.split()[0] for line in chat("/help").out.splitlines()] == list(COMMANDS)


@pytest.mark.long
def test_stats_before_and_after_an_answer(chat: Chat, tiny: Tiny) -> None:
    before, after = chat("/stats").out, chat("Hello", "Bye", "/stats", options=("--seed", 4)).out
    assert "last answer   none yet\n" in before
    assert "conversation  0 of 256 tokens\n" in before
    assert "seed          drawn anew for each answer\n" in before
    assert re.search(rf"^last answer   {LENGTH} tokens, [\d.]+ tok/s; tau \d", after, re.MULTILINE)
    assert re.search(rf"^all answers   {2 * LENGTH} tokens, ", after, re.MULTILINE)
    assert f"draft         {tiny.head}\n" in after
    assert "seed          4\n" in after


def test_tree_of_the_last_step(chat: Chat) -> None:
    answer, found, root, *lines = chat("Hello", "/tree").out.splitlines()
    number, steps, accepted, nodes = re.fullmatch(  # type: ignore[union-attr]
        r"step (\d+) of (\d+): (\d+) of (\d+) draft tokens accepted", found
    ).groups()
    assert int(number) <= int(steps)
    assert root[1:-1] in answer
    own = [line for line in lines if line.endswith("the target's own")]
    assert len(own) == 1
    assert len(lines) == int(nodes) + 1
    assert sum("✓" in line for line in lines) == int(accepted)


def test_no_tree_to_draw(chat: Chat) -> None:
    assert chat("/tree") == (1, "", NO_TREE)
    result = chat("Hello", "/tree", options=("--draft", "none"))
    assert (result.code, result.err) == (1, NO_TREE)


@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/frob", "unknown command /frob; /help lists them, and a space before the slash makes it a message"),
        ("/reset all", "/reset takes nothing behind it, and got 'all'"),
        ("/draft maybe", "/draft is 'maybe'; it must be on or off"),
        ("/seed -1", "/seed is '-1'; it must be a whole number from 0, or nothing for a new one each time"),
        (
            "x" * 300,
            "the prompt is too long: 318 tokens > 255 maximum; this model's maximum context length is 256 tokens, one "
            "of them the answer's: shorten it",
        ),
    ],
)
def test_a_mistake_is_one_line_and_the_chat_goes_on(chat: Chat, expected: Expected, line: str, message: str) -> None:
    result = chat(line, "Hello")
    assert (result.code, result.err) == (1, f"specdec: {message}\n")
    assert result.out.lstrip("\n") == f"{expected.answer('Hello')}\n"
    assert chat(line, typed=True).code == 0


def interrupt_step(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Press Ctrl-C in this step."""
    real, taken = LLMEngine.step, 0

    def step(engine: LLMEngine) -> list[Request]:
        nonlocal taken
        taken += 1
        if taken == number:
            raise KeyboardInterrupt
        return real(engine)

    monkeypatch.setattr(LLMEngine, "step", step)


def test_ctrl_c_ends_an_answer_and_not_the_chat(
    chat: Chat, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_step(monkeypatch, 4)
    result = chat("Hello", "and then?", typed=True)
    shown = result.out.split("the chat.\n\n", 1)[1]
    partial, second = shown.split("\n[interrupted]\n\n")
    assert (result.code, result.err) == (0, "")
    assert 3 <= len(partial) < LENGTH
    assert expected.answer("Hello").startswith(partial)
    # What was said is part of the conversation.
    assert second == f"{expected.answer('Hello', partial, 'and then?')}\n[cut at --max-tokens {LENGTH}]\n\n\n"


def test_ctrl_c_before_the_first_token_forgets_the_message(
    chat: Chat, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_step(monkeypatch, 1)
    shown = chat("Hello", "Bye", typed=True).out.split("the chat.\n\n", 1)[1]
    assert shown.startswith(f"\n[interrupted]\n\n{expected.answer('Bye')}\n")


@pytest.mark.long
def test_ctrl_c_at_the_prompt(chat: Chat, expected: Expected) -> None:
    result = chat(CTRL_C, "Hello", typed=True)
    assert result.code == 0
    assert f"Ctrl-D or /exit ends the chat.\n{expected.answer('Hello')}\n" in result.out


def test_ctrl_c_ends_piped_input(chat: Chat, expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_step(monkeypatch, 4)
    code, out, err = chat("Hello", "Bye")
    assert (code, err) == (130, "")
    assert expected.answer("Hello").startswith(out.removesuffix("\n"))


def test_a_model_without_a_chat_template(chat: Chat, tiny: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny.target, tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").unlink()
    for folder, line in {
        tmp_path / "plain": "no tokenizer with a chat template; use specdec generate --raw, which needs none",
        tiny.bare: "no tokenizer.json; give prompts as token ids, or add the tokenizer",
    }.items():
        result = chat("Hello", options=("--model", folder, "--draft", "none"))
        assert result == (2, "", f"specdec: {folder}: {line}\n")


def test_input_that_is_no_text(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    class Piped(io.StringIO):
        def readline(self, _: int = -1, /) -> str:  # type: ignore[override]
            return b"\xff".decode()

    monkeypatch.setattr("io.StringIO", Piped)
    result = chat()
    assert (result.code, result.out) == (2, "")
    assert re.fullmatch("specdec: standard input: not UTF-8 text: .*\n", result.err)


@pytest.mark.long
def test_typed_bytes_that_are_no_text(chat: Chat, expected: Expected) -> None:
    result = chat("a\udcffb", "Hello", typed=True)
    assert result.code == 0
    assert re.fullmatch("specdec: .* is not valid text: .*\n", result.err)
    assert f"\n{expected.answer('Hello')}\n" in result.out


@pytest.mark.long
def test_help_does_not_wait_for_torch() -> None:
    code = """
import sys
from specdec.cli.app import main
for args, expected in ((["chat", "--help"], 0), (["chat", "--top-p", "2"], 2)):
    try:
        main(args)
    except SystemExit as exited:
        assert exited.code == expected, exited.code
    assert "torch" not in sys.modules, args
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_drawn_tree(capsys: pytest.CaptureFixture[str]) -> None:
    step = TreeTrace(root=7, tokens=(1, 2, 3, 4), parents=(-1, -1, 1, 1), path=(1, 3), output=(2, 4, 9))
    Screen().draw(draw_tree(step, "t{}".format))
    assert capsys.readouterr().out == (
        "t7\n"  # the root
        "├── t1\n"
        "└── t2 ✓\n"
        "    ├── t3\n"
        "    └── t4 ✓\n"
        "        └── t9 ← the target's own\n"
    )


def test_a_deep_tree_is_drawn_whole(capsys: pytest.CaptureFixture[str]) -> None:
    depth = 60
    step = TreeTrace(0, tuple(range(depth)), tuple(range(-1, depth - 1)), (), (5,))
    Screen().draw(draw_tree(step, "token{}".format))
    found = re.findall(r"── token(\d+)$", capsys.readouterr().out, re.MULTILINE)
    assert found == [str(number) for number in range(depth)]


@pytest.mark.long
def test_text_of_tokens() -> None:
    tokenizer = LLM(draft=None, dtype="float32", adaptive_drafts=False, prefill_stretch=0).tokenizer
    assert tokenizer is not None
    encoded = tokenizer.encode(" a\n", add_special_tokens=False)
    assert "".join(token_text(tokenizer, token)[1:-1] for token in encoded) == " a\\n"
    # A byte that is no character by itself.
    half = tokenizer.backend.token_to_id("Ã")
    assert half is not None
    assert token_text(tokenizer, half) == "'Ã'"


@pytest.mark.long
def test_thinking_is_dimmed_and_no_part_of_an_answer_for_programs(
    chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_thinking_chain(tmp_path / "target")
    options = ("--model", tmp_path / "target", "--draft", "none", "--reasoning-parser", "qwen3", "--max-tokens", 5)
    seen: list[list[dict[str, str]]] = []
    prompt = Conversation._prompt

    def watched(self: Conversation, messages: list[dict[str, str]]) -> list[int]:
        seen.append(messages)
        return prompt(self, messages)

    monkeypatch.setattr(Conversation, "_prompt", watched)
    result = chat("hello", "hello", options=options)
    assert (result.code, result.out) == (0, f"{TEXT}\n{TEXT}\n")
    # The template of a later turn gets the thinking apart.
    assert seen[-1][1] == {"role": "assistant", "content": TEXT, "reasoning_content": THOUGHT}
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    shown = chat("hello", typed=True, options=options).out.split("the chat.\n\n")[1]
    dimmed = "".join(re.findall("\x1b\\[2m(.*?)\x1b\\[0m", shown))
    assert dimmed.startswith(THOUGHT)
    assert TEXT not in dimmed
    assert f"{TEXT}\n" in re.sub("\x1b\\[.*?m", "", shown)
