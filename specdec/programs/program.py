"""Programs: Python functions over a state, run on an engine or an endpoint."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import update_wrapper
from typing import Any

from specdec.core.progress import progress_bar as shown_progress
from specdec.programs.backend import Backend
from specdec.programs.expressions import Gen
from specdec.programs.run import Run
from specdec.programs.state import ProgramState
from specdec.programs.transcript import Transcript

# Programs of a batch that run at once. Each waits in a thread of its own; their requests share the engine's steps.
MOST_THREADS = 64


class Program:
    """A function whose first argument is a `ProgramState`.

    Called as a function, with a state, it is a part of another program.

    Args:
        function: gets the state and the arguments of `run`.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        update_wrapper(self, function)

    def __call__(self, state: ProgramState, *args: Any, **kwargs: Any) -> Any:
        return self._function(state, *args, **kwargs)

    def run(
        self,
        *args: Any,
        backend: Backend,
        params: Mapping[str, Any] | None = None,
        stream: bool = False,
        **kwargs: Any,
    ) -> ProgramState:
        """Run the function, and return its state once all branches have ended.

        Args:
            args, kwargs: arguments of the function.
            params: sampling parameters of each `gen` that does not give them, by the names of `SamplingParams`.
            stream: return at once, to read the state with `text_iter` while the function runs in a thread.

        Raises:
            ValueError: a parameter that is unknown or outside its range.
            Exception: of the function, after which its requests are aborted; or of a branch, unless the function has
                met it.
        """
        Gen(None, {}).params(defaults := dict(params or {}))
        backend.loop.check_outside()
        start = Future[Transcript]()
        start.set_result(Transcript())
        run = Run(backend, defaults)
        state = ProgramState(run, start, {})
        if stream:
            threading.Thread(target=self._run_quietly, args=(run, state, args, kwargs), daemon=True).start()
        else:
            self._run(run, state, args, kwargs)
        return state

    def _run(self, run: Run, state: ProgramState, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        run.thread = threading.current_thread()
        try:
            state.ret_value = self._function(state, *args, **kwargs)
            run.finish()
        except BaseException as error:
            run.cancel()
            state.end(error)
            raise
        state.end()

    def _run_quietly(self, run: Run, state: ProgramState, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run for a reader of the state, who gets the errors there."""
        with suppress(Exception):
            self._run(run, state, args, kwargs)

    def run_batch(
        self,
        arguments: Sequence[Mapping[str, Any]],
        *,
        backend: Backend,
        params: Mapping[str, Any] | None = None,
        num_threads: int = MOST_THREADS,
        progress_bar: bool = False,
    ) -> list[ProgramState]:
        """Run the function once for each set of arguments, side by side, and return the states in order.

        Args:
            arguments: keyword arguments of each run.
            params: see `run`.
            num_threads: most runs at once.
            progress_bar: show a bar.

        Raises:
            Exception: the first error of a run; see `run`. The others have ended.
        """
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}; it must be at least 1")
        threads = ThreadPoolExecutor(min(num_threads, max(1, len(arguments))))
        with shown_progress(len(arguments), "running", not progress_bar) as advance:
            # After Ctrl-C nothing further begins, and what runs is left to the backend to end.
            try:
                runs = [threads.submit(self.run, backend=backend, params=params, **own) for own in arguments]
                for one in runs:
                    one.add_done_callback(lambda _: advance())
                threads.shutdown()
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        return [one.result() for one in runs]


def function(function: Callable[..., Any]) -> Program:
    """Make a program of a function whose first argument is the state."""
    return Program(function)
