"""The state of a running program: appended text, variables, and branches."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self, overload

from specdec.programs.backend import Generated, Selected
from specdec.programs.expressions import Expression, Gen, RoleBegin, RoleEnd, Select, operations_of
from specdec.programs.run import Run, Variable
from specdec.programs.text_stream import TextPieces
from specdec.programs.transcript import Transcript

Appended = str | Expression
Info = Generated | Selected | None
Variables = Mapping[str, "Future[Variable] | list[Future[Variable]]"]


class ProgramState:
    """The text or conversation of a program, and its variables.

    `state += …` returns at once. What is appended is executed in its order, beside other branches. `state["name"]`
    waits for a variable, and raises the error of its branch.

    Args:
        tail: the transcript so far.
        variables: those of the branch that this one continues.

    Attributes:
        ret_value: value that the program's function returned.
    """

    def __init__(self, run: Run, tail: "Future[Transcript]", variables: Variables) -> None:
        self._run, self._tail = run, tail
        self._variables, self._inherited = dict(variables), dict(variables)
        self._stream = TextPieces(run.changed)
        self.ret_value: Any = None
        self._error: BaseException | None = None

    def __iadd__(self, other: str | Expression) -> Self:
        operations = operations_of(other)
        results: list[Future[Variable]] = []
        for operation in operations:
            if isinstance(operation, Gen | Select):
                results.append(Future())
                if operation.name is not None:
                    self._variables[operation.name] = results[-1]
        self._tail = self._run.append(self._tail, operations, results, self._stream)
        self._tail.add_done_callback(lambda _: self._stream.notify())
        return self

    def __getitem__(self, name: str) -> Any:
        """Wait for a variable, and return its text; after a join, a list of the branches' texts."""
        found = self._found(name)
        return [one.text for one in found] if isinstance(found, list) else found.text

    def __contains__(self, name: str) -> bool:
        return name in self._variables

    def get_meta_info(self, name: str) -> Info | list[Info]:
        """Wait for a variable, and return how it came about: counts of tokens, or scores."""
        found = self._found(name)
        return [one.info for one in found] if isinstance(found, list) else found.info

    def set_var(self, name: str, text: str) -> None:
        """Set a variable to a text, which is not appended."""
        self._variables[name] = future = Future[Variable]()
        future.set_result(Variable(text, None))

    def _found(self, name: str) -> Variable | list[Variable]:
        if name not in self._variables:
            if self._error is not None:
                raise self._error
            known = ", ".join(map(repr, self._variables)) or "none yet"
            raise KeyError(f"no variable {name!r}; there are: {known}")
        own = self._variables[name]
        if isinstance(own, list):
            return [self._run.result(one) for one in own]
        return self._run.result(own)

    def text(self) -> str:
        """Wait for all that was appended, and return the text; of a conversation, a line with its role per message."""
        return self._transcript().shown()

    def messages(self) -> list[dict[str, str]]:
        """Wait for all that was appended, and return the messages; none where there are no roles."""
        transcript = self._transcript()
        return transcript.conversation() if transcript.is_conversation else []

    def sync(self) -> None:
        """Wait for all that was appended."""
        self._transcript()

    def _transcript(self) -> Transcript:
        return self._run.result(self._tail)

    def text_iter(self, name: str | None = None) -> Iterator[str]:
        """Yield the text in parts as it grows: all that this branch appends, or that of one variable.

        Args:
            name: the variable; it may be appended later.

        Within the program's own function, where nothing is appended meanwhile, this ends with what was appended so far.

        Raises:
            Exception: an error of the branch.
        """
        for owner, text in self._stream.read(lambda: self._has_ended(name)):
            if text and (name is None or owner == name):
                yield text
        if self._error is not None:
            raise self._error
        if name is not None:
            self._found(name)
        else:
            self._transcript()

    def _has_ended(self, name: str | None) -> bool:
        own = self._variables.get(name) if name is not None else None
        if isinstance(own, Future):
            return own.done()
        return self._run.appends_nothing_more() and self._tail.done()

    def fork(self, size: int = 1) -> "ProgramStateGroup":
        """Return branches that continue this state, each with its own text and variables.

        They begin at its present end, and see nothing that is appended later. The engine computes what they share once.

        Raises:
            ValueError: a negative size.
        """
        if size < 0:
            raise ValueError(f"size is {size}; it must be a number of branches from 0")
        return ProgramStateGroup(self, [ProgramState(self._run, self._tail, self._variables) for _ in range(size)])

    def gather(self, branches: "Sequence[ProgramState]") -> None:
        """Take over the variables that branches have set, as lists with one entry per branch that has set it."""
        found: dict[str, list[Future[Variable]]] = {}
        for one in branches:
            for name, own in one._variables.items():
                if own is not one._inherited.get(name):
                    found.setdefault(name, []).extend(own if isinstance(own, list) else [own])
        self._variables |= found

    def role(self, name: str) -> AbstractContextManager[None]:
        """Return a context in which appended text belongs to a message of a role."""
        return _message(self, name)

    def system(self) -> AbstractContextManager[None]:
        """Return a context in which appended text belongs to a message of the system."""
        return _message(self, "system")

    def user(self) -> AbstractContextManager[None]:
        """Return a context in which appended text belongs to a message of the user."""
        return _message(self, "user")

    def assistant(self) -> AbstractContextManager[None]:
        """Return a context in which appended text belongs to a message of the assistant."""
        return _message(self, "assistant")

    def end(self, error: BaseException | None = None) -> None:
        """Tell readers of the text, of all branches, that the program appends nothing more.

        Args:
            error: why the program or one of its branches failed.
        """
        self._error, self._run.has_returned = error, True
        self._stream.notify()


@contextmanager
def _message(state: ProgramState, role: str) -> Iterator[None]:
    state += Expression((RoleBegin(role),))
    try:
        yield
    finally:
        state += Expression((RoleEnd(),))


class ProgramStateGroup:
    """Branches of a state. Appending to the group appends to each.

    Args:
        source: the state that they continue.
    """

    def __init__(self, source: ProgramState, branches: Sequence[ProgramState]) -> None:
        self.source, self.branches = source, list(branches)

    def __len__(self) -> int:
        return len(self.branches)

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self.branches)

    @overload
    def __getitem__(self, key: int) -> ProgramState: ...

    @overload
    def __getitem__(self, key: str) -> list[Any]: ...

    def __getitem__(self, key: int | str) -> ProgramState | list[Any]:
        """Return a branch by its number, or all branches' values of a variable.

        Raises:
            TypeError: neither a number nor a name.
        """
        if not isinstance(key, int | str):
            raise TypeError(f"a group has no {key!r}; give a branch's number or a variable's name, or use `branches`")
        return self.branches[key] if isinstance(key, int) else [branch[key] for branch in self.branches]

    def __iadd__(self, other: Appended | Sequence[Appended] | Callable[[int], Appended]) -> Self:
        """Append to each branch: the same, the entry of a list, or what a function of the branch's number returns.

        Raises:
            ValueError: a list without one entry for each branch.
        """
        if callable(other):
            other = [other(number) for number in range(len(self))]
        if isinstance(other, str | Expression):
            other = [other] * len(self)
        if len(other) != len(self):
            raise ValueError(f"a list of {len(other)} is appended to {len(self)} branches; give one entry for each")
        for branch, own in zip(self.branches, other, strict=True):
            branch += own
        return self

    def join(self) -> None:
        """Give the state the variables that its branches have set, as lists with one text per branch.

        The state's own text goes on where it was. This waits for nothing.
        """
        self.source.gather(self.branches)
