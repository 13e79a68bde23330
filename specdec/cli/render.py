"""Output of `specdec generate`: text with figures for people, and JSON lines for programs."""

import json
import sys
from collections import Counter
from collections.abc import Sequence

from specdec.bench.prompt_file import GivenPrompt
from specdec.cli.screen import BOLD, DIM, Screen
from specdec.cli.timed_batch import TimedAnswer, TimedBatch
from specdec.core.outputs import RequestOutput

# Least cost of a cycle that the line mentions. One that costs less has hardly a tree: n-grams have its nodes.
LEAST_CYCLE_COST = 1.05


class TextView:
    """Output for people: streamed text, or answers under headers if there are several, then the figures."""

    def __init__(self, given: Sequence[GivenPrompt], drafting: bool) -> None:
        self._given = given
        self._screen = Screen()
        if drafting:
            self._screen.write_legend()

    def show(self, output: RequestOutput) -> None:
        """Print the new text of a request."""
        if len(self._given) == 1:
            self._screen.write_segments(output.segments)

    def end(self, batch: TimedBatch, plain: TimedBatch | None) -> None:
        """Print the remaining output.

        Args:
            plain: the same run without drafts, if there was one.
        """
        total = len(self._given)
        if total > 1:
            for number, (one, answer) in enumerate(zip(self._given, batch.answers, strict=True), 1):
                space = "" if number == 1 else "\n\n"
                self._screen.write((f"{space}[{number}/{total}] {_shortened(one.text)}\n", BOLD))
                self._screen.write_segments(answer.segments)
        self._screen.write((f"\n\n{summary(batch, plain)}\n", DIM))


class JsonView:
    """Output for programs: one JSON object per request and line, in the order of the prompts."""

    def __init__(self, given: Sequence[GivenPrompt], compare: bool) -> None:
        self._given = given
        self._compare = compare

    def show(self, output: RequestOutput) -> None:
        pass

    def end(self, batch: TimedBatch, plain: TimedBatch | None) -> None:
        """Print all. Values that an interrupted comparison lacks are null."""
        pairs = plain.answers if plain else [None] * len(self._given)
        for one, answer, other in zip(self._given, batch.answers, pairs, strict=True):
            output, stats = answer.output, answer.output.stats
            value = {
                "prompt": one.text,
                "text": output.text,
                "token_ids": output.token_ids,
                "finish_reason": output.finish_reason,
                "error": output.error,
                "steps": stats.steps,
                "tau": stats.tau,
                "tree": batch.tree or None,
                "accepted_per_depth": stats.accepted_per_depth,
                "seconds": answer.seconds,
                "tok_per_s": answer.tok_per_s,
            }
            if self._compare:
                value |= _comparison(answer, other)
            sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()


def _comparison(answer: TimedAnswer, plain: TimedAnswer | None) -> dict[str, float | bool | None]:
    if plain is None or {"abort", "error"} & {answer.output.finish_reason, plain.output.finish_reason}:
        return {"plain_tok_per_s": None, "speedup": None, "equal": None}
    return {
        "plain_tok_per_s": plain.tok_per_s,
        "speedup": answer.tok_per_s / plain.tok_per_s,
        "equal": answer.output.token_ids == plain.output.token_ids,
    }


def summary(batch: TimedBatch, plain: TimedBatch | None = None) -> str:
    """Return the figures of a run in one line.

    Args:
        plain: the same run without drafts, if there was one.
    """
    line = f"{_counted(batch.tokens, 'token')}, {batch.tok_per_s:.1f} tok/s{_explained(batch)}"
    if plain and not plain.interrupted and plain.tok_per_s:
        total = len(batch.answers)
        unequal = sum(
            a.output.token_ids != b.output.token_ids for a, b in zip(batch.answers, plain.answers, strict=True)
        )
        line += f"; without drafts {plain.tok_per_s:.1f} tok/s, speed-up {batch.tok_per_s / plain.tok_per_s:.2f}x, " + (
            f"tokens differ in {unequal} of {total}" if unequal else "tokens equal"
        )
    cuts = Counter(answer.cut for answer in batch.answers if answer.cut)
    for cut, count in cuts.items():
        line += f"; {cut}" if len(batch.answers) == 1 else f"; {count} of {len(batch.answers)} {cut}"
    return line + (", interrupted" if batch.interrupted or (plain and plain.interrupted) else "")


def _explained(batch: TimedBatch) -> str:
    """Return where the tokens came from, and why the last steps drafted none if they did not."""
    stats = batch.stats
    if not stats.steps:
        return ""
    accepted = sum(stats.accepted_per_depth)
    first = batch.tokens - stats.tokens
    trees = f" (trees of {batch.tree})" if batch.tree and stats.drafted else ""
    text = (
        f"; tau {stats.tau:.2f}{trees}: {_counted(stats.tokens, 'token')} in {_counted(stats.steps, 'step')}, "
        f"{accepted} of them drafted, and {first} from {'the prompt pass' if first == 1 else 'prompt passes'}"
    )
    outlook, num_trees = batch.outlook, sum(len(answer.output.tree_steps) for answer in batch.answers)
    if outlook is None or outlook.pays or outlook.cycle_cost < LEAST_CYCLE_COST or num_trees >= stats.steps:
        return text
    cycle = f"a cycle costs {outlook.cycle_cost:.1f} plain steps, tau is {outlook.tau:.1f}"
    return f"{text}; drafts did not pay at the end: {cycle}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"
