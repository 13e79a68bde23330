"""A request in the front end: news of the engine become states."""

from dataclasses import dataclass, field

from specdec.async_engine.exchange import Arrivals
from specdec.async_engine.messages import ReplyTo
from specdec.core.choices import ChoiceScore
from specdec.core.commands import Add, Delta, News, Refused
from specdec.core.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SpeculationStats, Step
from specdec.text.segment import Segment


@dataclass
class _Sample:
    """One sample's output so far."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    text: str = ""
    held: str = ""
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    steps: list[Step] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    unread: list[Segment] = field(default_factory=list)

    def apply(self, delta: Delta) -> None:
        self.token_ids += delta.token_ids
        self.accepted += delta.accepted
        self.steps += delta.steps
        self.text += "".join(segment.text for segment in delta.segments)
        self.unread += delta.segments
        self.held, self.stats = delta.held, delta.stats
        self.finish_reason, self.stop_reason, self.error = delta.finish_reason, delta.stop_reason, delta.error
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += delta.logprobs
            new = zip(delta.logprobs, delta.token_ids, strict=True)
            self.cumulative_logprob = sum(
                (entries[token].logprob for entries, token in new), self.cumulative_logprob or 0
            )

    def read(self) -> CompletionOutput:
        """Return a snapshot, with the text that is new since the last one."""
        segments, self.unread = self.unread, []
        return CompletionOutput(
            index=self.index,
            text=self.text + self.held,
            token_ids=list(self.token_ids),
            accepted=list(self.accepted),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            cumulative_logprob=self.cumulative_logprob,
            # Every delta brings new ones.
            stats=self.stats,
            steps=list(self.steps),
            segments=segments,
        )


class RequestStream:
    """States of one request for one reader. States that are not read are merged, so a slow reader costs no memory.

    Args:
        prompt: text as given, None for token ids.
    """

    def __init__(self, request_id: str, prompt: str | None, add: Add) -> None:
        self.request_id, self._lora_request = request_id, add.adapter
        self._prompt, self._prompt_token_ids = prompt, list(add.prompt)
        self._samples = [_Sample(index) for index in range(add.params.n)]
        self._scores_prompt = add.params.prompt_logprobs is not None
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._num_cached_tokens: int | None = None
        self._choices: list[ChoiceScore] | None = None
        self._metrics: RequestMetrics | None = None
        self._arrivals = Arrivals()
        self._has_failed = False

    @property
    def finished(self) -> bool:
        """True once all samples have ended, or the request has failed."""
        return self._has_failed or all(sample.finish_reason is not None for sample in self._samples)

    def receive(self, reply: ReplyTo) -> None:
        """Take news, or a refusal."""
        match reply.reply():
            case News(deltas):
                for delta in deltas:
                    self._apply(delta)
            case Refused() as refused:
                self.fail(refused.error())
            case other:
                raise TypeError(f"no reply to a request: {other!r:.60}")

    def _apply(self, delta: Delta) -> None:
        self._samples[delta.sample_index].apply(delta)
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = self._prompt_logprobs or []
            self._prompt_logprobs += delta.prompt_logprobs
        if delta.metrics is not None:
            self._num_cached_tokens, self._metrics = delta.num_cached_tokens, delta.metrics
        self._choices = delta.choices
        # Samples that begin behind a cached prompt do not wait for the first one, which scores it.
        if self._prompt_logprobs is not None or not self._scores_prompt or self.finished:
            self._arrivals.notify()

    def fail(self, error: Exception) -> None:
        """Have the reader get an error, unless the request has finished."""
        if not self.finished:
            self._has_failed = True
            self._arrivals.fail(error)

    async def read(self) -> RequestOutput:
        """Wait for news, and return the state.

        Raises:
            ValueError, QueueFullError, EngineDeadError: the request was refused, or the engine process ended.
        """
        await self._arrivals.wait()
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[sample.read() for sample in self._samples],
            finished=self.finished,
            prompt_logprobs=None if self._prompt_logprobs is None else list(self._prompt_logprobs),
            num_cached_tokens=self._num_cached_tokens,
            metrics=self._metrics,
            choices=self._choices,
            lora_request=self._lora_request,
        )
