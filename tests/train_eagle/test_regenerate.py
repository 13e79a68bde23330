"""Answers of the target: none is lost, none is made twice, and whatever is left out is counted and named."""

import fcntl
import json
import os
import re
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from specdec import LLM, SamplingParams
from specdec.core.request import Request
from specdec.engine.engine import LLMEngine
from specdec.engine.request_maker import RequestMaker
from specdec.train_eagle.data import regeneration
from specdec.train_eagle.data.answer_journal import AnswerJournal, AnswerRow
from specdec.train_eagle.program import main
from tests.command_line import Result, Run, run_command
from tests.word_llama import WORDS, save_word_llama

pytestmark = pytest.mark.slow

Turn = dict[str, str]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_word_llama(folder)
    return folder


def talk(i: int, turns: int) -> list[Turn]:
    """A conversation whose answers are still to be replaced."""
    words = [f"{WORDS[(7 * i + k) % 80]} {WORDS[(3 * i + k) % 80]}" for k in range(turns)]
    return [
        part for word in words for part in ({"role": "user", "content": word}, {"role": "assistant", "content": "?"})
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fourteen conversations of one to three turns."""
    file = tmp_path_factory.mktemp("data") / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": talk(i, 1 + i % 3)}) + "\n" for i in range(14)))
    return file


@pytest.fixture
def run(target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """`specdec regenerate` at temperature 1, where the model ends its answers, into `answers.jsonl`."""

    def call(**changes: object) -> Result:
        fixed = {"model": target, "data": data, "out": tmp_path / "answers.jsonl", "dtype": "float64", "device": "cpu"}
        words = ["regenerate"]
        for name, value in {**fixed, "max_num_seqs": 4, "max_tokens": 60, "temperature": 1, **changes}.items():
            given = () if value is True else value if isinstance(value, tuple) else (value,)
            words += [f"--{name.replace('_', '-')}", *map(str, given)]
        return run_command(capsys, *words, program=main)

    return call


def answers(folder: Path) -> list[list[Turn]]:
    return [json.loads(line)["messages"] for line in (folder / "answers.jsonl").read_text().splitlines()]


def journal(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "answers.jsonl.journal").read_text().splitlines()]


@pytest.mark.long
def test_answers_are_the_models_after_its_own_earlier_ones(run: Run, target: Path, data: Path, tmp_path: Path) -> None:
    assert run().code == 0
    given = [json.loads(line)["messages"] for line in data.read_text().splitlines()]
    llm = LLM(target, dtype="float64", device="cpu")
    ended = {row["conversation"] for row in journal(tmp_path)[1:] if "problem" in row}
    found = iter(answers(tmp_path))
    for number, messages in enumerate(given):
        wanted: list[Turn] = []
        for turn, question in enumerate(messages[::2]):
            params = SamplingParams(temperature=1, max_tokens=60, seed=1000 * number + turn)
            (output,) = llm.chat([[*wanted, question]], params)
            if output.finish_reason != "stop" or not output.text:
                assert number in ended
                break
            wanted += [question, {"role": "assistant", "content": output.text}]
        if wanted:
            assert next(found) == wanted
    assert next(found, None) is None


@pytest.mark.long
def test_conversations_left_out_are_counted_and_named(run: Run, data: Path, tmp_path: Path) -> None:
    result = run(max_tokens=12)
    problems = {row["conversation"]: row for row in journal(tmp_path)[1:] if "problem" in row}
    cut = [row for row in problems.values() if row["problem"] == "answer longer than --max-tokens 12"]
    nothing = [row for row in cut if row["turn"] == 0]
    assert nothing
    assert len(cut) > len(nothing)
    shown = [[part.strip() for part in line.split("  ") if part.strip()] for line in result.out.splitlines()]
    for rows, what in ((nothing, "conversation"), ([row for row in cut if row["turn"]], "later turns")):
        (line,) = [parts for parts in shown if parts[0] == f"answer longer than --max-tokens 12, {what} left out"]
        places = [f"{data}:{number + 1}" for number in sorted(row["conversation"] for row in rows)][:3]
        assert line[1:] == [str(len(rows)), ", ".join(places)]
    assert f"{len(cut)} of 14 conversations have an answer that is cut; raise --max-tokens" in result.out
    part, none = sum(row["turn"] > 0 for row in problems.values()), sum(row["turn"] == 0 for row in problems.values())
    ends = f"{14 - part - none} answered, {part} in part, {none} not at all, 0 unusable; {14 - none} in"
    assert f"14 conversations read: {ends}" in result.out
    assert len(answers(tmp_path)) == 14 - none


@pytest.mark.long
def test_beginnings_of_longer_answers_can_be_kept(run: Run, tmp_path: Path) -> None:
    """Each is the last of its conversation, and the beginning of the answer that a larger limit gives."""
    result = run(max_tokens=12, keep_cut=True)
    cut = {row["conversation"]: row for row in journal(tmp_path)[1:] if "text" in row and "problem" in row}
    assert re.search(rf"answer longer than --max-tokens 12, the rest left out +{len(cut)} ", result.out)
    assert "raise --max-tokens" not in result.out
    kept = answers(tmp_path)
    for file in tmp_path.glob("answers*"):
        file.unlink()
    run()
    whole = {row["conversation"]: row for row in journal(tmp_path)[1:] if row["turn"] == 0}
    first = {number: row for number, row in cut.items() if row["turn"] == 0}
    assert first
    for number, row in first.items():
        assert whole[number].get("text", row["text"]).startswith(row["text"])
        assert [messages[1]["content"] for messages in kept].count(row["text"])


@pytest.mark.long
def test_the_same_command_takes_up_the_beginnings_as_its_summary_says(run: Run, tmp_path: Path) -> None:
    """And drops them again; neither makes an answer anew."""
    wanted = {}
    for name, changes in (("kept", {"keep_cut": True}), ("left out", {})):
        run(max_tokens=12, **changes)
        wanted[name] = (tmp_path / "answers.jsonl").read_bytes()
        for file in tmp_path.glob("answers*"):
            file.unlink()
    assert "or give --keep-cut" in run(max_tokens=12).out
    made = (tmp_path / "answers.jsonl.journal").read_bytes()
    for name, changes in (("kept", {"keep_cut": True}), ("left out", {"leave_out_cut": True})):
        result = run(max_tokens=12, **changes)
        assert result.code == 0, result.err
        assert (tmp_path / "answers.jsonl").read_bytes() == wanted[name]
        assert (tmp_path / "answers.jsonl.journal").read_bytes() == made
    assert wanted["kept"] != wanted["left out"]


def test_a_run_without_answers_fails(run: Run) -> None:
    result = run(max_tokens=1, temperature=0)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "nothing is answered: 14 answer longer than --max-tokens 1, conversation left out" in result.err


@pytest.mark.long
def test_other_settings_into_the_same_file_are_refused(run: Run, target: Path, data: Path, tmp_path: Path) -> None:
    assert run().code == 0
    before = (tmp_path / "answers.jsonl").read_bytes()
    (other_data := tmp_path / "other.jsonl").write_text(data.read_text() + data.read_text())
    other_model = tmp_path / target.name
    save_word_llama(other_model, seed=1)
    for changes, told in (
        ({"temperature": 0}, "made with temperature [1.0], not [0.0]"),
        ({"temperature": (0, 1)}, "made with temperature [1.0], not [0.0, 1.0]"),
        ({"data": other_data}, "made with data "),
        ({"model": other_model}, f"made with model {target.name} ("),
        ({"max_tokens": 61}, "made with max_tokens 60, not 61"),
        ({"top_k": 3}, "made with top_k 0, not 3"),
        ({"seed": 1}, "made with seed 0, not 1"),
        ({"limit": 3}, "made with limit None, not 3"),
        ({"dtype": "float32"}, "made with dtype float64, not float32"),
    ):
        result = run(**changes)
        assert (result.code, result.err.count("\n")) == (2, 1), result
        assert told in result.err
        assert "give its settings, or another --out" in result.err
    assert (tmp_path / "answers.jsonl").read_bytes() == before
    again = run()
    assert (again.code, (tmp_path / "answers.jsonl").read_bytes()) == (0, before)
    assert "14 conversations read" in again.out
    assert "were on disk from an earlier run" in again.out


def test_a_file_of_unknown_origin_is_kept(run: Run, tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text("mine\n")
    result = run()
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "answers.jsonl: exists, and answers.jsonl.journal is missing" in result.err
    assert (tmp_path / "answers.jsonl").read_text() == "mine\n"


def test_a_folder_that_is_not_there_is_told_before_the_model_is_loaded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.cli.model_options.ModelOptions.load", None)
    result = run(out=tmp_path / "none" / "answers.jsonl")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert f"--out {tmp_path / 'none' / 'answers.jsonl'}: {tmp_path / 'none'} is no folder" in result.err


@pytest.mark.long
def test_a_run_goes_on_behind_any_byte_of_its_journal(run: Run, tmp_path: Path) -> None:
    """A kill leaves a part of the journal, its last row torn, and any part of the conversations."""
    run()
    whole, out = (tmp_path / "answers.jsonl.journal").read_bytes(), (tmp_path / "answers.jsonl").read_bytes()
    for end in (40, whole.index(b"\n") + 1, len(whole) // 2, len(whole) - 1):
        (tmp_path / "answers.jsonl.journal").write_bytes(whole[:end])
        (tmp_path / "answers.jsonl").write_bytes(out[: end // 2])
        assert run().code == 0
        assert (tmp_path / "answers.jsonl").read_bytes() == out
        left = (tmp_path / "answers.jsonl.journal").read_bytes()
        assert left.startswith(whole[: whole[:end].rfind(b"\n") + 1])
        assert sorted(left.splitlines()) == sorted(whole.splitlines())


def test_a_full_disk_leaves_whole_rows(tmp_path: Path) -> None:
    """It takes a part of a row without an error; the next row followed on the same line, which no run could read."""
    rows = [AnswerRow(conversation=i, turn=0, text="x" * 50) for i in range(3)]
    written = AnswerJournal(tmp_path / "journal", {"seed": 0})
    written.add(rows[0])
    before = (tmp_path / "journal").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (40, 0):
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + room, limits[1]))
        try:
            with pytest.raises(OSError, match=r"journal: cannot be written: .*; make room, and the same command goes"):
                written.add(rows[1])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert (tmp_path / "journal").read_bytes() == before
    written.add(rows[2])
    written.close()
    again = AnswerJournal(tmp_path / "journal", {"seed": 0})
    assert again.rows == written.rows == [rows[0], rows[2]]
    again.close()


@pytest.mark.long
def test_a_killed_run_leaves_its_answers(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By kill -9, amid a batch: each answer is on disk as soon as it ends, and the next run makes the rest."""
    run(out=tmp_path / "whole.jsonl")
    file = tmp_path / "answers.jsonl.journal"
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        real = LLMEngine.step

        def step(engine: LLMEngine) -> list[Request]:
            if file.read_bytes().count(b"\n") >= 4:
                os.write(writer, b"!")
                signal.pause()
            return real(engine)

        monkeypatch.setattr(LLMEngine, "step", step)
        run()
        os._exit(0)
    os.close(writer)
    assert os.read(reader, 1) == b"!", "it came to its end before it was killed"
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    killed = file.read_bytes()
    ended = sum("answers" not in row for row in journal(tmp_path)[1:])
    assert 3 <= ended < len((tmp_path / "whole.jsonl.journal").read_text().splitlines()) - 1
    result = run()
    assert f"{ended:,} answers were on disk" in result.out
    assert file.read_bytes().startswith(killed[: killed.rfind(b"\n") + 1])
    assert (tmp_path / "answers.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.long
def test_the_bar_of_a_resumed_run_ends_full(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run()
    file = tmp_path / "answers.jsonl.journal"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:9]))
    bars, steps = [], []

    @contextmanager
    def bar(total: int, _: str) -> Iterator[Callable[[], None]]:
        bars.append(total)
        yield lambda: steps.append(1)

    monkeypatch.setattr(regeneration, "progress_bar", bar)
    run()
    assert bars == [len(steps)]
    assert 0 < len(steps) < 14


@pytest.mark.long
def test_ctrl_c_keeps_what_has_ended(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(out=tmp_path / "whole.jsonl")
    real, taken = LLMEngine.step, 0

    def step(engine: LLMEngine) -> list[Request]:
        nonlocal taken
        taken += 1
        if taken > 60:
            raise KeyboardInterrupt
        return real(engine)

    with monkeypatch.context() as patch:
        patch.setattr(LLMEngine, "step", step)
        result = run()
    assert result.code == 130
    assert "the same command goes on" in result.out
    whole = [json.loads(line)["messages"] for line in (tmp_path / "whole.jsonl").read_text().splitlines()]
    kept = answers(tmp_path)
    assert 0 < len(kept) < len(whole)
    assert [messages for messages in whole if messages in kept] == kept
    assert run().code == 0
    assert (tmp_path / "answers.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.long
def test_two_runs_do_not_write_one_file(run: Run, tmp_path: Path) -> None:
    run()
    file = tmp_path / "answers.jsonl.journal"
    with file.open("ab") as lines:
        fcntl.flock(lines, fcntl.LOCK_EX)
        assert "another process writes it" in run().err


@pytest.mark.long
def test_a_turn_follows_at_once_on_the_one_before(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No conversation waits for the end of another ones' turn, and no seat of the engine is empty while any waits."""
    real, running = LLMEngine.step, []

    def step(engine: LLMEngine) -> list[Request]:
        found = real(engine)
        running.append((len(engine.scheduler.running), len(engine.scheduler.waiting)))
        return found

    monkeypatch.setattr(LLMEngine, "step", step)
    run()
    turns = [row["turn"] for row in journal(tmp_path)[1:]]
    assert turns != sorted(turns)
    first = [row["conversation"] for row in journal(tmp_path)[1:] if row["turn"] == 0]
    assert turns.index(1) < len(first)
    assert all(seats + waiting >= 4 for seats, waiting in running[: len(running) // 2])


@pytest.mark.long
def test_drafts_and_sampling_are_those_of_the_options(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[SamplingParams, RequestMaker]] = []
    real = RequestMaker.add

    def add(maker: RequestMaker, prompt: Any, params: SamplingParams, *more: Any) -> Any:
        seen.append((params, maker))
        return real(maker, prompt, params, *more)

    monkeypatch.setattr(RequestMaker, "add", add)
    options = {"top_k": 5, "top_p": 0.9, "min_p": 0.01, "min_tokens": 2, "repetition_penalty": 1.1, "stop": "w3"}
    run(**options)
    assert all(
        getattr(params, name) == value for params, _ in seen for name, value in options.items() if name != "stop"
    )
    assert all(params.stop_strings == ("w3",) for params, _ in seen)
    plain = (tmp_path / "answers.jsonl").read_bytes()
    result = run(**options, draft="ngram", out=tmp_path / "drafted.jsonl")
    assert re.search(r"tau \d\.\d\d \(at most 15 nodes, depth 6\)", result.out)
    drafted = seen[-1][1].config
    assert (drafted.chains, drafted.dtype, drafted.device) == (("ngram",), "float64", "cpu")
    assert (tmp_path / "drafted.jsonl").read_bytes() == plain
    # Another draft goes on where the first stopped: coupled drafts change no token.
    assert run(**options, draft="ngram").code == 0
    assert "made with drafts any, not ngram" in run(**options, draft="ngram", verify="rejection").err


@pytest.mark.long
def test_a_last_question_is_answered_in_every_form(run: Run, tmp_path: Path) -> None:
    """A conversation lost its last question, and one without answers was left out."""
    first, answer, last, _ = talk(1, 2)
    one, two = (
        [{"messages": [first]}, {"prompt": first["content"]}],
        [
            {"messages": [first, answer, last]},
            # As in UltraChat, with the first question once more.
            {"prompt": first["content"], "messages": [first, answer, last]},
            {"turns": [first["content"], last["content"]]},
        ],
    )
    (file := tmp_path / "asked.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [*one, *two] * 6))
    assert " 0 unusable; " in run(data=file).out
    rows = journal(tmp_path)[1:]
    early = {row["conversation"] for row in rows if "problem" in row}
    whole = {
        number: {row["turn"] for row in rows if row["conversation"] == number} for number in set(range(30)) - early
    }
    assert {len(turns) for number, turns in whole.items() if number % 5 < 2} == {1}
    assert {len(turns) for number, turns in whole.items() if number % 5 >= 2} == {2}
    questions = [[turn["content"] for turn in turns if turn["role"] == "user"] for turns in answers(tmp_path)]
    assert [first["content"], last["content"]] in questions
    assert all(turns[-1]["role"] == "assistant" for turns in answers(tmp_path))


@pytest.mark.long
def test_bad_input_is_left_out_counted_and_refused_if_asked(run: Run, tmp_path: Path) -> None:
    sharegpt = {"conversations": [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}]}
    silent = {"messages": [{"role": "system", "content": "w1"}]}
    (file := tmp_path / "a.json").write_text(json.dumps([sharegpt, silent, {"messages": 3}]))
    result = run(data=file, temperature=1, max_tokens=100)
    assert ", 2 unusable; " in result.out
    assert re.search(r"no question +2  .*a.json:1, .*a.json:1", result.out)
    with_strict = run(data=file, strict=(), out=tmp_path / "other.jsonl")
    assert (with_strict.code, "a.json, line 1: no question: the user says nothing" in with_strict.err) == (2, True)
    assert not (tmp_path / "other.jsonl").exists()
