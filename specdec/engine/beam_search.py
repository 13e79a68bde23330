"""Beam search: the most probable sequences after a prompt. Beams share the cache blocks of their common tokens."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

from specdec.core.outputs import BeamSearchOutput, BeamSearchSequence
from specdec.core.request import Request
from specdec.core.sampling_params import BeamSearchParams
from specdec.models.tokenizer import Tokenizer
from specdec.scheduling.scheduler import Scheduler


@dataclass(eq=False)
class BeamRequest(Request):
    """A beam. Its tokens never change; each of its children has one token more.

    A step scores the tokens that can follow it: `logprobs` then has one entry more than there are output tokens. From
    then on all its tokens are cached, so the scheduler plans no row for it, and keeps its blocks for its children.

    Attributes:
        cum_logprob: sum of the output tokens' log-probabilities.
        may_follow: not, since others go on with its tokens.
    """

    may_follow: bool = False
    cum_logprob: float = 0.0

    @property
    def is_scored(self) -> bool:
        return len(self.logprobs) > self.num_output

    @property
    def may_draft(self) -> bool:
        """False: drafts predict the token that a sampler picks, and a search follows several."""
        return False

    def append(self, token: int, accepted: bool) -> None:
        """Ignore the engine's token, which is one candidate of the search among others."""
        assert not accepted, "a beam has no drafts"
        assert token in self.logprobs[-1], "a beam is scored"
        # A beam that was preempted after it was scored, and ran again in a step of another call, is scored twice.
        del self.logprobs[self.num_output + 1 :]

    @classmethod
    def of(cls, request: Request, *tokens: int, cum_logprob: float = 0.0) -> "BeamRequest":
        """Make a beam of a request's tokens and further ones, which is not queued yet.

        Args:
            request: the parent, or a request that asks for log-probabilities and is not queued.
        """
        return cls(
            request_id=request.request_id,
            token_ids=[*request.token_ids, *tokens],
            num_prompt=request.num_prompt,
            params=request.params,
            sampling=request.sampling,
            max_length=request.max_length,
            end_tokens=request.end_tokens,
            # It is only used for the text of single tokens, so beams can share it.
            detokenizer=request.detokenizer,
            priority=request.priority,
            cache_salt=request.cache_salt,
            adapter=request.adapter,
            publishes=request.publishes,
            logprobs=list(request.logprobs),
            cum_logprob=cum_logprob,
        )


class Candidate(NamedTuple):
    """A beam with one more token."""

    parent: BeamRequest
    token: int
    cum_logprob: float


class BeamSearch:
    """The search after one prompt, with the results of transformers' `generate` for the same number of beams.

    Beams are requests of the engine. Once all of them are scored, the best candidates become the next beams. They are
    forks of their parents, which end.

    Args:
        root: the prompt; its `params.logprobs` is the number of a beam's candidates that can matter.

    Attributes:
        number: names it among the searches of an engine.
        beams: live beams of equal length, best first.
        ended: at most `beam_width` sequences that have ended, best first.
        error: why the search failed, if it has.
        finished: whether the search is over, with no beam queued.
    """

    def __init__(self, number: int, scheduler: Scheduler, params: BeamSearchParams, root: BeamRequest) -> None:
        self.number, self._scheduler, self.params, self.root = number, scheduler, params, root
        self.beams = [root]
        self.ended: list[BeamSearchSequence] = []
        self.error: str | None = None
        self.finished = False

    def go_on(self, is_stuck: bool) -> None:
        """Advance the search after a step.

        Args:
            is_stuck: whether no request could run, so that scored beams have to make room for the others.
        """
        self.error = next((beam.error for beam in self.beams if beam.error), None)
        if self.error is not None:
            self.abort()
        elif all(beam.is_scored for beam in self.beams):
            self._choose()
        else:
            for beam in self.beams:
                # A scored beam that was preempted would be recomputed and scored again.
                if beam.is_scored and (is_stuck or not beam.block_table):
                    self._scheduler.finish(beam)

    def abort(self) -> None:
        """End the search and all its beams before it has its result."""
        self.finished = True
        for beam in self.beams:
            self._scheduler.abort(beam)

    def _finish(self) -> None:
        """End the search and all its beams with its result."""
        self.finished = True
        scheduler = self._scheduler
        for beam in self.beams:
            scheduler.finish(beam)
        scheduler.count_output(sum(len(sequence.token_ids) for sequence in self.ended))

    def output(self, tokenizer: Tokenizer | None) -> BeamSearchOutput:
        """Return the sequences found, with their text."""
        if self.error is not None:
            return BeamSearchOutput([], self.error)
        if tokenizer is None:
            return BeamSearchOutput(list(self.ended))
        return BeamSearchOutput([replace(found, text=tokenizer.decode(found.tokens)) for found in self.ended])

    def _choose(self) -> None:
        """Divide the candidates into sequences that end and the next beams."""
        width, ends = self.params.beam_width, self.root.end_tokens
        is_last = self.beams[0].num_remaining == 1
        ranked = [
            (-(beam.cum_logprob + entry.logprob), place, token)
            for place, beam in enumerate(self.beams)
            for token, entry in beam.logprobs[-1].items()
        ]
        candidates = [Candidate(self.beams[place], token, -negated) for negated, place, token in sorted(ranked)]
        # A candidate that ends counts only among the `beam_width` best of all. Later ones can only become beams.
        self.ended += [self._sequence(found) for found in candidates[:width] if is_last or found.token in ends]
        self.ended = sorted(self.ended, key=lambda sequence: -sequence.score)[:width]
        live = [] if is_last else [found for found in candidates if found.token not in ends][:width]
        if live and self._may_improve(live[0]):
            self._fork(live)
        else:
            self._finish()

    def _sequence(self, found: Candidate) -> BeamSearchSequence:
        parent, token, cum_logprob = found
        return BeamSearchSequence(
            tokens=[*parent.token_ids, token],
            logprobs=list(parent.logprobs),
            cum_logprob=cum_logprob,
            score=self.params.score(cum_logprob, parent.num_output + 1),
            finish_reason="stop" if token in parent.end_tokens else "length",
        )

    def _may_improve(self, best: Candidate) -> bool:
        """Return whether a live beam may still score better than the sequences that have ended."""
        params = self.params
        if len(self.ended) < params.beam_width:
            return True
        if params.early_stopping is True or params.beam_width == 1:
            return False
        length = best.parent.num_output + 1
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self.root.max_length - self.root.num_prompt
        return params.score(best.cum_logprob, length) > self.ended[-1].score

    def _fork(self, live: list[Candidate]) -> None:
        """Replace the beams by their children."""
        scheduler = self._scheduler
        parents = self.beams
        children = [BeamRequest.of(parent, token, cum_logprob=total) for parent, token, total in live]
        # Parents and children, so that `abort` finds each at any moment.
        self.beams = [*parents, *children]
        seats = scheduler.free_seats(leaving=parents)
        late = []
        for found, child in zip(live, children, strict=True):
            if seats > 0 and found.parent.block_table:
                scheduler.fork(found.parent, child)
                seats -= 1
            else:
                late.append((found.parent, child))
        for parent in parents:
            scheduler.finish(parent)
        for parent, child in late:
            # By now the parent has no blocks, so the child queues for a seat.
            scheduler.fork(parent, child)
        self.beams = children


class BeamSearches:
    """The searches of an engine, of which as many run at once as have seats for all their beams."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._numbers = count()
        self._pending: list[BeamSearch] = []
        self._active: list[BeamSearch] = []
        # Free blocks before the last step was planned.
        self._num_free = 0

    def add(self, params: BeamSearchParams, root: BeamRequest) -> BeamSearch:
        """Begin a search as soon as there are seats for it."""
        self._pending.append(BeamSearch(next(self._numbers), self._scheduler, params, root))
        return self._pending[-1]

    def end(self, numbers: Collection[int]) -> None:
        """End searches before they have their results."""
        for search in (*self._pending, *self._active):
            if search.number in numbers:
                search.abort()
        self._forget_ended()

    def begin(self) -> None:
        """Queue the prompts of pending searches that have seats, before a step is planned."""
        if not self._pending and not self._active:
            return
        scheduler = self._scheduler
        seats = scheduler.config.max_num_seqs - sum(search.params.beam_width for search in self._active)
        while self._pending and (width := self._pending[0].params.beam_width) <= seats:
            if scheduler.refusal(self._pending[0].root) is not None:
                break
            seats -= width
            self._active.append(self._pending.pop(0))
            scheduler.add(self._active[-1].root)
        self._num_free = scheduler.manager.pool.num_free

    def go_on(self, is_stuck: bool) -> None:
        """Advance the searches after a step.

        Args:
            is_stuck: whether no request could run, so that scored beams have to make room for the others.
        """
        if not self._active:
            return
        for search in self._active:
            search.go_on(is_stuck)
        has_room = self._scheduler.manager.pool.num_free > self._num_free
        assert has_room or not is_stuck, "no beam can run, and none makes room"
        self._forget_ended()

    def _forget_ended(self) -> None:
        self._pending, self._active = (
            [search for search in searches if not search.finished] for searches in (self._pending, self._active)
        )
