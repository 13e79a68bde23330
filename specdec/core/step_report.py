"""Traced steps with their texts: the form of the HTTP API, of trace files and of the viewer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from specdec.core.outputs import CompletionOutput, TreeTrace
from specdec.core.sampling_params import SamplingParams
from specdec.text.detokenizer import Detokenizer
from specdec.text.stop_strings import StopStrings, special_in_stops
from specdec.text.token_texts import TokenTexts


@dataclass(frozen=True)
class TokenReport:
    """A token.

    Attributes:
        text: the token's text inside of a text, or its name in the vocabulary where it is no whole character; None
            without a tokenizer.
        accepted: whether it was an accepted draft token.
    """

    token: int
    text: str | None
    accepted: bool


@dataclass(frozen=True)
class NodeReport:
    """A node of a draft tree.

    Attributes:
        text: as in `TokenReport`.
        parent: index of its parent among the step's nodes, -1 for the root.
        value: the drafter's log-probability of the path that ends here, by which nodes are ranked; None if it has none.
        target_prob: the target's probability of the token after its parent; None where it is not a number.
        accepted: whether the output took it.
    """

    token: int
    text: str | None
    parent: int
    value: float | None
    target_prob: float | None
    accepted: bool


@dataclass(frozen=True)
class PieceReport:
    """New text of the output, and whether its tokens are accepted drafts."""

    text: str
    accepted: bool


@dataclass(frozen=True)
class StepReport:
    """One step of one output.

    Attributes:
        seconds: time of the step, shared with all requests of the step.
        plain_seconds: time that it would have taken without drafts: its own if it had none, else predicted from
            measured costs; None where they are not measured.
        root: the last known token, under which the tree hangs.
        nodes: the draft tree, parents before children; empty in a plain step, and in the pass over the prompt.
        output: the tokens that the output took: accepted nodes, and the target's own token after them.
        pieces: the text that the output gained. A step may gain less than its tokens' text: what may begin a stop
            string, and an incomplete character, come with a later one.
    """

    seconds: float
    plain_seconds: float | None
    root: TokenReport
    nodes: list[NodeReport]
    output: list[TokenReport]
    pieces: list[PieceReport]


class StepReporter:
    """Reports of one output's steps, each once.

    Args:
        tokenizer: None for reports without texts.
        params: parameters of the request; they tell which text the output leaves out.
        stops: its stop strings, if other outputs of the request search for them as well.
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams, stops: StopStrings | None = None) -> None:
        self._tokenizer, self._params = tokenizer, params
        self._stops = StopStrings(params.stop_strings) if stops is None else stops
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)
        # Made with the first step: most outputs report none.
        self._detokenizer: Detokenizer | None = None
        self._num_reported = self._num_tokens = 0

    def _new_detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        params = self._params
        return Detokenizer(
            self._tokenizer,
            self._stops,
            params.include_stop_str_in_output,
            params.skip_special_tokens,
            params.spaces_between_special_tokens,
            prompt,
            params.kept_special_tokens or (),
            {} if self._tokenizer is None else special_in_stops(self._tokenizer, self._stops),
        )

    def new_steps(self, output: CompletionOutput) -> list[StepReport]:
        """Return the steps since the last call.

        Args:
            output: a state of the traced output, not older than that of the last call.
        """
        new, self._num_reported = output.steps[self._num_reported :], len(output.steps)
        return [self._report(step.trace, output) for step in new if step.trace is not None]

    def _report(self, step: TreeTrace, output: CompletionOutput) -> StepReport:
        path = set(step.path)
        if step.context or self._detokenizer is None:
            self._detokenizer = self._new_detokenizer(step.context)
        columns = zip(step.tokens, step.parents, step.values, step.probs, strict=True)
        return StepReport(
            seconds=step.seconds,
            plain_seconds=step.plain_seconds,
            root=self._token(step.root, False),
            nodes=[
                NodeReport(token, self._text(token), parent, _finite(value), _finite(prob), node in path)
                for node, (token, parent, value, prob) in enumerate(columns)
            ],
            output=[self._token(token, place < len(step.path)) for place, token in enumerate(step.output)],
            pieces=self._pieces(step, output, self._detokenizer),
        )

    def _pieces(self, step: TreeTrace, output: CompletionOutput, detokenizer: Detokenizer) -> list[PieceReport]:
        """Return the text that a step adds, as the request itself has detokenized it."""
        ends_by_token = output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
        for place, token in enumerate(step.output):
            self._num_tokens += 1
            is_last = self._num_tokens == len(output.token_ids)
            if not (is_last and ends_by_token) or self._params.include_stop_str_in_output:
                may_stop = self._num_tokens > self._params.min_tokens and not (is_last and ends_by_token)
                detokenizer.push(token, place < len(step.path), may_stop)
        is_end = output.finish_reason is not None and self._num_tokens == len(output.token_ids)
        return [PieceReport(piece.text, piece.accepted) for piece in detokenizer.segments(final=is_end)]

    def _token(self, token: int, accepted: bool) -> TokenReport:
        return TokenReport(token, self._text(token), accepted)

    def _text(self, token: int) -> str | None:
        return None if self._texts is None else self._texts.name(token)


def _finite(value: float | None) -> float | None:
    """Return the number, None where JSON has no form for it."""
    return value if value is not None and math.isfinite(value) else None
