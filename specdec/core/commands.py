"""Commands to an engine, and its replies.

`LLMEngine.handle` acts on commands. Within a process they are passed as they are, and errors are raised. Between
processes they are encoded (`specdec/async_engine/messages.py`), and an error is a `Refused`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Self

from specdec.core.choices import ChoiceScore
from specdec.core.engine_stats import EngineStats
from specdec.core.errors import QueueFullError
from specdec.core.lora_request import LoRARequest
from specdec.core.outputs import Logprob, RequestMetrics, SpeculationStats, Step
from specdec.core.sampling_params import BeamSearchParams, SamplingParams
from specdec.kernels.types.settings import ParameterError, one_line
from specdec.text.segment import Segment


@dataclass
class EngineReply:
    """Base of all replies to commands."""


class Delta(NamedTuple):
    """News of one sample of a request since its last delta; see `CompletionOutput` and `RequestOutput`.

    Attributes:
        held: text behind all segments so far, which a stop string may still cut off.
        stats: figures so far.
        num_cached_tokens, metrics: in the first and the last delta of the request.
        choices: in the last delta.
    """

    sample_index: int
    token_ids: list[int]
    accepted: list[bool]
    segments: list[Segment]
    held: str
    stats: SpeculationStats
    steps: list[Step]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None
    metrics: RequestMetrics | None = None
    choices: list[ChoiceScore] | None = None


@dataclass
class News(EngineReply):
    """News of a request: deltas of a step, or of several where they could not be sent earlier."""

    deltas: list[Delta]


@dataclass
class Done(EngineReply):
    """The command was carried out."""


@dataclass
class Refused(EngineReply):
    """The command was not carried out, and nothing has changed.

    Attributes:
        message: one line.
        kind: whether the command is at fault, the engine has no room for it now, or something else went wrong.
        field, code: those of a `ParameterError`.
    """

    message: str
    kind: Literal["wrong", "queue_full", "failed"]
    field: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, error: Exception) -> Self:
        """Return the refusal that stands for an error."""
        if isinstance(error, QueueFullError):
            return cls(one_line(error), "queue_full")
        if isinstance(error, ParameterError):
            return cls(one_line(error), "wrong", error.field, error.code)
        # OSError: a file that cannot be read.
        if isinstance(error, ValueError | OSError):
            return cls(one_line(error), "wrong")
        return cls(f"{type(error).__name__}: {one_line(error)}", "failed")

    def error(self) -> Exception:
        """Return the error that it stands for, to be raised in the user's process."""
        if self.field is not None:
            return ParameterError(self.field, self.message, self.code)
        kinds = {"wrong": ValueError, "queue_full": QueueFullError, "failed": RuntimeError}
        return kinds[self.kind](self.message)


@dataclass
class Stats(EngineReply):
    """Counts of the engine, and its state."""

    stats: EngineStats


@dataclass
class Integrity(EngineReply):
    """Result of a check of the scheduler and the cache.

    Attributes:
        problem: the first invariant that does not hold, if any.
        requests: requests that the engine knows.
        blocks: cache blocks that are held, those in host memory included.
    """

    problem: str | None
    requests: int
    blocks: int


@dataclass
class Unloaded(EngineReply):
    """Reply to `UnloadAdapter`.

    Attributes:
        was_loaded: whether the adapter was loaded before.
    """

    was_loaded: bool


@dataclass
class EngineCommand:
    """Base of all commands to an engine."""

    # Whether later requests meet another engine than before.
    CHANGES_ENGINE: ClassVar[bool] = False

    def joined(self, replies: Sequence[EngineReply], problem: str | None) -> EngineReply:
        """Return the joint reply of several engines.

        Args:
            problem: why an engine did not reply, if one did not.
        """
        if problem is not None:
            return Refused(f"a replica did not answer: {problem}; try again", "queue_full")
        refusals = [reply for reply in replies if isinstance(reply, Refused)]
        return refusals[0] if refusals else self._joined(replies)

    def _joined(self, replies: Sequence[EngineReply]) -> EngineReply:
        return next(iter(replies), Done())


@dataclass
class Add(EngineCommand):
    """Run a request. Its replies are `News`, the last of which has the end of every sample.

    `RequestMaker.add` makes and checks it, in the user's process.

    Attributes:
        prompt: tokens.
        params: with their texts as tokens.
        text: the prompt as given, for outputs; None where these are made elsewhere.
        client: name of the client that sent it.
        interval: seconds for which news after the first token may wait; infinity for none until the end.
        trace: whether deltas hold all steps with their draft trees.
    """

    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    adapter: LoRARequest | None = None
    text: str | None = None
    client: str = ""
    interval: float = 0.0
    trace: bool = False

    def aborted(self) -> News:
        """Return the news of a request that was ended before an engine had it."""
        samples = range(self.params.n)
        return News([Delta(index, [], [], [], "", SpeculationStats(), [], "abort") for index in samples])


@dataclass
class Abort(EngineCommand):
    """End a request at any moment. It keeps its output, without what the running step yields for it.

    Attributes:
        request_id: that of its `RequestGroup`. One that has ended, or never was, is passed over.
    """

    request_id: str


@dataclass
class UpdateDraft(EngineCommand):
    """Replace the draft head by that of a folder, between two steps."""

    CHANGES_ENGINE: ClassVar[bool] = True
    folder: str


@dataclass
class LoadAdapter(EngineCommand):
    """Load an adapter if it is not yet."""

    CHANGES_ENGINE: ClassVar[bool] = True
    adapter: LoRARequest


@dataclass
class UnloadAdapter(EngineCommand):
    """Give up an adapter's place once no request has it. The reply is `Unloaded`."""

    CHANGES_ENGINE: ClassVar[bool] = True
    lora_int_id: int

    def _joined(self, replies: Sequence[EngineReply]) -> EngineReply:
        return Unloaded(any(reply.was_loaded for reply in replies if isinstance(reply, Unloaded)))


@dataclass
class GetStats(EngineCommand):
    """Reply with `Stats`."""

    def _joined(self, replies: Sequence[EngineReply]) -> EngineReply:
        return Stats(EngineStats.total([reply.stats for reply in replies if isinstance(reply, Stats)]))


@dataclass
class CheckIntegrity(EngineCommand):
    """Check the scheduler and the cache. The reply is `Integrity`."""

    def _joined(self, replies: Sequence[EngineReply]) -> EngineReply:
        found = [reply for reply in replies if isinstance(reply, Integrity)]
        problem = next((reply.problem for reply in found if reply.problem is not None), None)
        return Integrity(problem, sum(reply.requests for reply in found), sum(reply.blocks for reply in found))


@dataclass
class Stop(EngineCommand):
    """Abort all requests. Nothing is asked afterwards."""


@dataclass
class RunStep(EngineCommand):
    """Run a step, if any request can run. Engines that are alike and get the same commands run the same steps.

    Attributes:
        clock: seconds of the monotonic clock: the only time on which it depends what is planned.
        measured: seconds of the pass and of drafting of a step before, from which the engine learns; None if it was
            not measured.
        check: of the plan of the step before, whose equality it shows.
    """

    clock: float
    measured: tuple[float, float] | None
    check: int


@dataclass
class Search(EngineCommand):
    """Run beam searches, one after each prompt.

    Attributes:
        adds: the prompts; their `params.logprobs` is the number of a beam's candidates that can matter.
    """

    adds: list[Add]
    params: BeamSearchParams


@dataclass
class EndSearches(EngineCommand):
    """End beam searches and their beams before they have their results.

    Attributes:
        numbers: of searches. Those that have ended are passed over.
    """

    numbers: list[int]


@dataclass
class Close(EngineCommand):
    """Store what a connector has still to store. Nothing follows."""


# Those that have one reply at once.
Control = Abort | UpdateDraft | LoadAdapter | UnloadAdapter | GetStats | CheckIntegrity | Stop
AnyCommand = Add | Control
# What ranks tell each other besides.
Told = RunStep | Search | EndSearches | Close
AnyReply = News | Done | Refused | Stats | Integrity | Unloaded
