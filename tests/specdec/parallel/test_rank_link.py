"""The link of the first rank to another one: answers, reasons, signs of life, and their absence."""

import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.kernels.types.settings import ParameterError
from specdec.parallel import rank_link
from specdec.parallel.first_rank import FirstRank
from specdec.parallel.rank_layout import RankLayout
from specdec.parallel.rank_link import MOST_MISSED, RankLink
from specdec.parallel.ranks import Alive, Failure, OtherRank, RankDeadError, Shared
from tests.specdec.parallel.ranked_engine import engine
from tests.specdec.world import World

LONG = 60.0
SOON = 0.01


class FakeProcess:
    """A process that ends when it is killed, with the exit code of that."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.killed = threading.Event()

    def poll(self) -> int | None:
        return self.code

    def wait(self, timeout: float | None = None) -> int:  # noqa: ARG002
        return self.code or 0

    def kill(self) -> None:
        self.code = -9
        self.killed.set()


class Pair:
    """A link, its process, and the other end."""

    def __init__(self) -> None:
        own, self.other = Pipe()
        self.process = FakeProcess()
        self.link = RankLink(own, self.process)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.link.close()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end
        time.sleep(SOON)


def test_answers_come_in_their_order_and_signs_of_life_are_none(pair: Pair) -> None:
    for said in (Shared(3), Alive(), Shared(0), Alive(), Shared(5)):
        pair.other.send(said)
    assert [pair.link.answer(LONG) for _ in range(3)] == [Shared(3), Shared(0), Shared(5)]
    assert pair.link.answer(SOON) is None
    assert pair.link.is_alive
    assert pair.link.end(SOON) is None


def test_a_rank_that_says_why_it_fails(pair: Pair) -> None:
    pair.other.send(Failure("no memory is left"))
    pair.other.close()
    assert pair.link.answer(LONG) is None
    assert not pair.link.is_alive
    assert (pair.link.end(LONG), pair.link.failure) == (None, "no memory is left")


def test_a_rank_that_is_gone(pair: Pair) -> None:
    pair.process.code = -11
    pair.other.close()
    assert pair.link.end(LONG) == "has ended with exit code -11"
    assert not pair.link.is_alive
    assert pair.link.failure is None


def test_a_silent_rank_is_killed_once_it_has_been_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, it imports and loads, which may take long."""
    monkeypatch.setattr(rank_link, "BEAT", SOON)
    pair = Pair()
    time.sleep(3 * MOST_MISSED * SOON)
    assert pair.link.is_alive
    pair.other.send(Alive())
    assert pair.process.killed.wait(LONG)
    assert not pair.link.is_alive
    assert pair.link.end(0) == f"has given no sign of life for {MOST_MISSED * SOON:g} seconds"
    pair.link.close()


def test_an_idle_engine_lives_until_a_rank_is_silent(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are threads, so that one is silenced rather than stopped."""
    for module in ("rank_link", "ranks"):
        monkeypatch.setattr(f"specdec.parallel.{module}.BEAT", 0.1)
    beats: list[Alive] = []
    is_silent = threading.Event()

    def say(self: Any, message: Any) -> None:
        if not is_silent.is_set():
            self._connection.send(message)
        if isinstance(message, Alive):
            beats.append(message)

    monkeypatch.setattr("specdec.parallel.ranks.OtherRank._send", say)
    with engine(world, "none", pipeline_parallel_size=2) as llm:
        wait_for(lambda: len(beats) > MOST_MISSED)
        llm.engine.ranks.check()
        is_silent.set()
        silent_from = len(beats)
        errors: list[str] = []

        def is_dead() -> bool:
            try:
                llm.engine.ranks.check()
            except RankDeadError as error:
                errors.append(str(error))
            return bool(errors)

        wait_for(is_dead)
        assert errors == ["rank 1 of 2 has given no sign of life for 0.8 seconds; the engine must be started anew"]
        # The rank was there all the time.
        wait_for(lambda: len(beats) > silent_from)


def test_a_decision_that_is_refused_is_refused_by_all() -> None:
    """Whatever the error: one of a parameter is made of more than its message, and is not sent."""
    own, other = Pipe()
    first = FirstRank(
        RankLayout(2, 1), SimpleNamespace(processes=[FakeProcess()], connections=[own], close=lambda: None)
    )

    def refuse() -> int:
        raise ParameterError("n", "n is 2")

    with pytest.raises(ParameterError):
        first.decide(refuse)
    with pytest.raises(ValueError, match=r"^n is 2$"):
        OtherRank(other, None, 1).decide(refuse)
    first.kill()
