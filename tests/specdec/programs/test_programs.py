"""Programs over a backend without a model: order, branches, roles, variables, streams and errors."""

import gc
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from specdec import programs as sp
from specdec.core.choices import ChoiceScore
from specdec.programs.expressions import Expression
from specdec.programs.transcript import ProgramMessage, Transcript
from tests.specdec.programs.echo_backend import EchoBackend


@pytest.fixture
def backend() -> Iterator[EchoBackend]:
    with EchoBackend() as backend:
        yield backend


@sp.function
def two_gens(s: sp.ProgramState, word: str) -> Any:
    s += word + sp.gen("a", stop="\n") + "-" + sp.gen("b", max_tokens=5, temperature=0)
    return "a" + s["a"]


def test_operations_come_in_order_and_variables_are_read_where_they_are_needed(backend: EchoBackend) -> None:
    state = two_gens.run("four", backend=backend, params={"temperature": 0.5, "max_tokens": 7})
    assert state.text() == "four<4>-<8>"
    assert (state["a"], state["b"], state.ret_value) == ("<4>", "<8>", "a<4>")
    assert "a" in state
    assert "c" not in state
    first, second = backend.params
    assert (first.temperature, first.max_tokens, first.stop_strings) == (0.5, 7, ("\n",))
    assert (second.temperature, second.max_tokens, second.stop_strings) == (0, 5, ())
    info = state.get_meta_info("a")
    assert not isinstance(info, list)
    assert info is not None
    assert info.text == "<4>"


@pytest.mark.parametrize("size", [1, 3, 20])
def test_branches_run_at_once_and_join_as_lists(size: int) -> None:
    @sp.function
    def program(s: sp.ProgramState) -> None:
        s += "stem" + sp.gen("first")
        forks = s.fork(size)
        s += "main" + sp.gen("own")
        for number, fork in enumerate(forks):
            fork += str(number) * (1 + number) + sp.gen("part")
        # Nothing is answered before all of them run, this one's own text included.
        assert forks[0]["first"] == "<4>"
        forks += "!"
        forks.join()
        s += "|".join(s["part"])

    with EchoBackend(1, size + 1) as backend:
        state = program.run(backend=backend)
        parts = [f"<{7 + len(str(number)) * (1 + number)}>" for number in range(size)]
        assert state["part"] == parts
        assert state.text() == "stem<4>main<11>" + "|".join(parts)
        assert [info.text for info in state.get_meta_info("part")] == parts  # type: ignore[union-attr]


def test_a_second_join_of_a_name_replaces_the_first(backend: EchoBackend) -> None:
    @sp.function
    def program(s: sp.ProgramState) -> list[Any]:
        joined = []
        for size in (2, 3):
            s += "." + sp.gen("own")
            forks = s.fork(size)
            for number, fork in enumerate(forks):
                fork += str(number) * (1 + number) + sp.gen("part")
            s.set_var("own", "set behind the fork")
            forks.join()
            joined.append(s["part"])
        return [*joined, s["own"]]

    state = program.run(backend=backend)
    assert state.ret_value == [["<5>", "<6>"], ["<9>", "<10>", "<11>"], "set behind the fork"]


def test_a_group_appends_to_each_branch(backend: EchoBackend) -> None:
    @sp.function
    def program(s: sp.ProgramState) -> list[str]:
        s += "x"
        forks = s.fork(2)
        forks += ["a", "bb"]
        forks += lambda number: str(number)
        forks += sp.gen("g")
        assert len(forks) == len(list(forks)) == 2
        assert forks["g"] == ["<3>", "<4>"]
        return [fork.text() for fork in forks]

    state = program.run(backend=backend)
    assert state.ret_value == ["xa0<3>", "xbb1<4>"]
    assert state.text() == "x"


def test_wrong_uses_of_a_group_are_refused(backend: EchoBackend) -> None:
    @sp.function
    def program(s: sp.ProgramState) -> list[str]:
        forks = s.fork(3)
        with pytest.raises(ValueError, match="a list of 2 is appended to 3 branches; give one entry for each"):
            forks += ["a", "b"]
        with pytest.raises(TypeError, match=r"a group has no slice\(1, None, None\); give a branch's number"):
            forks[1:]  # type: ignore[call-overload]
        with pytest.raises(ValueError, match="size is -1; it must be a number of branches from 0"):
            s.fork(-1)
        return [fork.text() for fork in forks]

    assert program.run(backend=backend).ret_value == ["", "", ""]


def test_select_takes_a_choice_and_keeps_the_scores(backend: EchoBackend) -> None:
    @sp.function
    def program(s: sp.ProgramState) -> None:
        s += "abc " + sp.select("letters", choices=["ad", "cab", "abcz"]) + "!"
        s += sp.gen("again", choices=["zz", "a"])

    state = program.run(backend=backend)
    assert state.text() == "abc cab!a"
    info = state.get_meta_info("letters")
    assert not isinstance(info, list)
    assert info is not None
    assert [score.logprobs for score in info.scores] == [[0, -1], [0, 0, 0], [0, 0, 0, -1]]  # type: ignore[union-attr]


def test_methods_of_selection() -> None:
    scores = [ChoiceScore([1] * len(own), own) for own in ([-1.0, -0.1, -0.1], [-0.9], [-0.8, -2.0])]
    assert sp.token_length_normalized(scores) == 0
    assert sp.total_logprob(scores) == 1
    assert sp.greedy_token_selection(scores) == 2
    # A choice that another begins with is compared by its mean.
    shorter, longer = ChoiceScore([1], [-0.5]), ChoiceScore([1, 2], [-0.5, -0.6])
    assert sp.greedy_token_selection([longer, shorter]) == 1


def test_roles_make_a_conversation(backend: EchoBackend) -> None:
    @sp.function
    def program(s: sp.ProgramState) -> None:
        s += sp.system("Be brief.") + sp.user("Hi")
        s += sp.assistant("Well, " + sp.gen("answer"))
        with s.user():
            s += "And "
            s += "now?"
        with s.assistant():
            s += sp.select("last", choices=["yes", "no"])

    state = program.run(backend=backend)
    assert state.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Well, <44>"},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": state["last"]},
    ]
    assert state.text().splitlines()[1] == "user: Hi"
    assert backend.asked[0].role == "assistant"
    assert backend.asked[0].text == "Well, "
    assert backend.asked[1].messages[-1] == ProgramMessage("user", "And now?")


def test_an_error_within_a_message_ends_the_message(backend: EchoBackend) -> None:
    @sp.function
    def program(s: sp.ProgramState) -> None:
        with suppress(LookupError), s.user():
            s += "Hi"
            raise LookupError("of the program's own")
        s += sp.assistant(sp.gen("answer"))

    state = program.run(backend=backend)
    assert [message["role"] for message in state.messages()] == ["user", "assistant"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (sp.user("a" + sp.gen()), "gen or select in a message of 'user'; in a conversation, put them into assistant"),
        (sp.user("a") + sp.gen(), "gen or select in no message"),
        (sp.user("a") + "b", "the text 'b' follows a message; in a conversation, put all text into roles"),
        ("a" + sp.user("b"), "a message of 'user' follows the text 'a'; put all text into roles"),
        (sp.user(sp.system("b")), "a message of 'system' begins within one of 'user'; end that first"),
    ],
)
def test_misplaced_text_is_refused(backend: EchoBackend, content: Expression, message: str) -> None:
    @sp.function
    def program(s: sp.ProgramState) -> None:
        s += content

    with pytest.raises(ValueError, match=message.replace("(", "\\(")):
        program.run(backend=backend)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sp.gen(temperatur=1), "temperatur"),
        (lambda: sp.gen(max_tokens=0), "max_tokens is 0"),
        (lambda: sp.gen(n=2), "n is 2; a gen is one text: leave it out"),
        (lambda: sp.gen(regex="a", json_schema={}), "structured_outputs has json and regex"),
        (lambda: sp.select("a", choices=[]), "choices is \\[\\]"),
        (lambda: sp.gen("a", choices=["a", ""]), "choices holds an empty one"),
        (lambda: sp.gen("a", choices=["a"], typo=3), "SamplingParams has no 'typo'"),
        (lambda: sp.gen("a", max_tokens=-5, choices=["a"]), "max_tokens is -5; it must be at least 1"),
        (lambda: sp.gen() + 5, "a program appends 5; it must be text, gen, select or a role"),  # type: ignore[operator]
    ],
)
def test_wrong_expressions_are_refused_where_they_are_written(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_an_error_is_raised_where_its_branch_is_read_and_at_the_end(backend: EchoBackend) -> None:
    @sp.function
    def unread(s: sp.ProgramState) -> None:
        s += "a"
        fork = s.fork()[0]
        fork += "fail" + sp.gen("x") + sp.gen("y")

    @sp.function
    def read(s: sp.ProgramState) -> str:
        (fork,) = s.fork()
        fork += "fail" + sp.gen("x") + sp.gen("y")
        with pytest.raises(RuntimeError, match="tired"):
            fork["y"]
        s += "go on " + sp.gen("z")
        return "caught"

    with pytest.raises(RuntimeError, match="the model is tired"):
        unread.run(backend=backend)
    state = read.run(backend=backend)
    assert (state.ret_value, state["z"]) == ("caught", "<6>")
    with pytest.raises(KeyError, match="no variable 'q'; there are: 'z'"):
        state["q"]


def test_transcripts_that_others_continue_are_not_kept(backend: EchoBackend) -> None:
    @sp.function
    def program(s: sp.ProgramState) -> int:
        for _ in range(50):
            s += "kept nowhere"
        s.sync()
        gc.collect()
        return sum(isinstance(one, Transcript) and one.text.startswith("kept nowhere") for one in gc.get_objects())

    # The loop may still hold those of its last tasks.
    assert program.run(backend=backend).ret_value <= 3


def test_a_function_that_raises_ends_its_requests() -> None:
    @sp.function
    def program(s: sp.ProgramState) -> None:
        s += "a" + sp.gen("x")
        raise LookupError("of the program's own")

    with EchoBackend(2) as backend:
        with pytest.raises(LookupError, match="of the program's own"):
            program.run(backend=backend)
        backend.loop.close()
        assert backend.aborted == len(backend.asked)


def test_closing_the_backend_ends_a_batch() -> None:
    """Also those of its programs that begin while it is being closed, or later."""
    errors: list[BaseException | None] = []

    @sp.function
    def program(s: sp.ProgramState) -> str:
        s += "a" + sp.gen("x")
        return s["x"] + s.text()

    def run() -> None:
        try:
            program.run_batch([{}] * 200, backend=backend)
        except RuntimeError as error:
            errors.append(error)

    with EchoBackend(1000) as backend:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        while not backend.asked:
            time.sleep(0.001)
        backend.loop.close()
        thread.join(60)
    assert not thread.is_alive()
    assert [str(error) for error in errors] == ["the backend is closed"]


def test_what_never_began_fails_with_its_backend() -> None:
    backend = EchoBackend(1000)
    is_held, is_closing, has_appended = threading.Event(), threading.Event(), threading.Event()

    async def close_meanwhile() -> None:
        """Hold the loop until it is to end everything, with a branch that has not begun."""
        is_held.set()
        assert is_closing.wait(60)

    @sp.function
    def program(s: sp.ProgramState) -> None:
        s += "a" + sp.gen("x")
        has_appended.set()
        s.sync()

    backend.loop.submit(close_meanwhile())
    assert is_held.wait(60)
    state = program.run(backend=backend, stream=True)
    assert has_appended.wait(60)
    closing = threading.Thread(target=backend.loop.close, daemon=True)
    closing.start()
    while backend.loop.is_running:
        time.sleep(0.001)
    is_closing.set()
    for read in (lambda: state["x"], lambda: list(state.text_iter("x")), lambda: list(state.text_iter())):
        with pytest.raises(RuntimeError, match="the backend is closed"):
            read()
    closing.join(60)
    with pytest.raises(RuntimeError, match="the backend is closed"):
        program.run(backend=backend)


def test_text_is_read_while_it_grows(backend: EchoBackend) -> None:
    state = two_gens.run("four", backend=backend, stream=True)
    assert list(state.text_iter()) == ["four", "<", "4", ">", "-", "<", "8", ">"]
    # A reader that comes later gets all of it, too.
    assert "".join(state.text_iter()) == "four<4>-<8>"
    assert list(two_gens.run("four", backend=backend, stream=True).text_iter("b")) == ["<", "8", ">"]


def test_a_function_reads_what_it_has_appended_so_far(backend: EchoBackend) -> None:
    @sp.function
    def program(s: sp.ProgramState) -> list[list[str]]:
        s += "four" + sp.gen("a")
        so_far = list(s.text_iter())
        s += "!"
        with pytest.raises(KeyError, match="no variable 'b'; there are: 'a'"):
            list(s.text_iter("b"))
        return [so_far, list(s.text_iter("a")), list(s.text_iter())]

    state = program.run(backend=backend)
    answer = ["<", "4", ">"]
    assert state.ret_value == [["four", *answer], answer, ["four", *answer, "!"]]


def test_errors_reach_the_reader_of_a_stream(backend: EchoBackend) -> None:
    @sp.function
    def program(s: sp.ProgramState) -> None:
        s += "so far"
        raise LookupError("of the program's own")

    for name in (None, "x"):
        with pytest.raises(LookupError, match="of the program's own"):
            list(program.run(backend=backend, stream=True).text_iter(name))
    with pytest.raises(RuntimeError, match="tired"):
        list(two_gens.run("fail", backend=backend, stream=True).text_iter())

    @sp.function
    def unread(s: sp.ProgramState) -> None:
        (fork,) = s.fork()
        fork += "fail" + sp.gen("x")
        s += "so far"

    with pytest.raises(RuntimeError, match="tired"):
        list(unread.run(backend=backend, stream=True).text_iter())


def test_a_reader_of_a_branch_gets_the_end_of_the_program(backend: EchoBackend) -> None:
    """It has all of the branch's text and waits, as the function could still append more."""
    forks: list[sp.ProgramState] = []
    has_fork, may_return = threading.Event(), threading.Event()
    read: list[str] = []

    @sp.function
    def program(s: sp.ProgramState) -> None:
        (fork,) = s.fork()
        fork += "a" + sp.gen("x")
        fork.sync()
        forks.append(fork)
        has_fork.set()
        may_return.wait()

    program.run(backend=backend, stream=True)
    has_fork.wait()
    reader = threading.Thread(target=lambda: read.extend(forks[0].text_iter()), daemon=True)
    reader.start()
    while not forks[0]._stream._changed._waiters:  # type: ignore[attr-defined]
        time.sleep(0.001)
    may_return.set()
    reader.join(60)
    assert not reader.is_alive()
    assert read == ["a", "<", "1", ">"]


def test_programs_run_in_batches_and_within_each_other(backend: EchoBackend) -> None:
    @sp.function
    def outer(s: sp.ProgramState, word: str) -> Any:
        return word + two_gens(s, word)

    states = outer.run_batch([{"word": "a" * n} for n in range(1, 30)], backend=backend, num_threads=4)
    assert [state.ret_value for state in states] == ["a" * n + f"a<{n}>" for n in range(1, 30)]
    with pytest.raises(ValueError, match="num_threads is 0"):
        outer.run_batch([], backend=backend, num_threads=0)
    with pytest.raises(TypeError, match="word"):
        outer.run_batch([{}], backend=backend)
    with pytest.raises(ValueError, match="temperature is -1"):
        outer.run("a", backend=backend, params={"temperature": -1})
    with pytest.raises(ValueError, match="n is 3; a gen is one text: leave it out"):
        outer.run("a", backend=backend, params={"n": 3})


@pytest.mark.long
def test_ctrl_c_begins_no_further_program_of_a_batch(backend: EchoBackend) -> None:
    ran: list[threading.Thread] = []
    may_end = threading.Event()

    @sp.function
    def program(s: sp.ProgramState) -> None:
        s += "a"
        ran.append(threading.current_thread())
        if len(ran) == 1:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        assert may_end.wait(60)

    # A shell starts programs in the background with it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            program.run_batch([{}] * 9, backend=backend, num_threads=1)
    finally:
        signal.signal(signal.SIGINT, before)
        may_end.set()
    ran[0].join(60)
    assert len(ran) == 1


def test_variables_can_be_set(backend: EchoBackend) -> None:
    @sp.function
    def program(s: sp.ProgramState) -> None:
        s.set_var("given", "text")
        s += s["given"]

    state = program.run(backend=backend)
    assert (state["given"], state.get_meta_info("given"), state.text()) == ("text", None, "text")


def test_a_program_cannot_wait_within_its_backend(backend: EchoBackend) -> None:
    async def within() -> None:
        two_gens.run("a", backend=backend)

    with pytest.raises(RuntimeError, match="cannot run within the event loop of its own backend"):
        backend.loop.run(within())


@pytest.mark.long
def test_programs_over_endpoints_start_without_torch() -> None:
    code = "import sys, specdec.programs; sys.exit(', '.join({'torch', 'transformers'} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
