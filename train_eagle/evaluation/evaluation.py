"""The measurements of an evaluation, as JSON, tables and a plot."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import matplotlib

matplotlib.use("agg")

from matplotlib import pyplot as plt
from pydantic import TypeAdapter, ValidationError
from rich.table import Table

from specdec.draft_heads.drafting.draft_shape import DraftShape

FILE = "evaluation.json"
PICTURE = "evaluation.png"
STYLES = ("-", "--", ":", "-.")


def format_shares(shares: Iterable[float]) -> str:
    """Return shares with two digits each."""
    return " ".join(f"{share:.2f}" for share in shares)


@dataclass(frozen=True)
class Measured:
    """Acceptance measured by the engine, on one kind of text at one temperature.

    Attributes:
        domain: the kind of text.
        tree: bounds of the draft trees.
        prompts: number of prompts answered.
        tau: mean tokens emitted per target step, the bonus token included.
        accepted_per_depth: share of steps that accept a draft token of depth 1, 2, …
        tokens: number of tokens that the steps emitted.
        steps: number of target steps.
        tok_per_s, plain_tok_per_s: tokens per second of single requests, with adaptive trees and without drafts; None
            if not measured.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    domain: str
    temperature: float
    tree: DraftShape
    prompts: int
    tau: float
    accepted_per_depth: list[float]
    tokens: int
    steps: int
    tok_per_s: float | None = None
    plain_tok_per_s: float | None = None

    @property
    def speedup(self) -> float | None:
        """Speed over plain decoding, if it was measured."""
        return self.tok_per_s / self.plain_tok_per_s if self.tok_per_s and self.plain_tok_per_s else None

    @property
    def cells(self) -> tuple[str, ...]:
        """Domain, temperature, tree, tau, speed over plain decoding and accepted shares for a table."""
        speed = "" if self.speedup is None else f"{self.speedup:.2f}"
        shares = format_shares(self.accepted_per_depth)
        return self.domain, f"{self.temperature:g}", self.tree.in_words, f"{self.tau:.2f}", speed, shares


@dataclass(frozen=True)
class Evaluation:
    """Measurements of a head on some kinds of text.

    Attributes:
        model, draft: folders of target and head.
        max_tokens: most tokens of an answer.
        measured: acceptance by domain, temperature and tree.
        accuracy: by domain and depth, how often the target's next token at temperature 0 is among the head's 1, 2 and
            3 likeliest tokens, given that its drafts so far were right.
        machine: what the speeds were measured on.
        vocabulary: `vocabulary_digest` of the target; None without a tokenizer.
        weights: `file_digest` of the head's weights.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    model: str
    draft: str
    dtype: str
    max_tokens: int
    measured: list[Measured]
    accuracy: dict[str, list[list[float]]]
    machine: str = ""
    vocabulary: str | None = None
    weights: str | None = None

    @classmethod
    def read(cls, file: Path) -> "Evaluation":
        """Read what `save` wrote.

        Raises:
            ValueError: the file is missing, or holds something else.
        """
        try:
            return TypeAdapter(cls).validate_json(file.read_bytes())
        except OSError as error:
            raise ValueError(f"{file}: cannot be read: {error.strerror}; give an {FILE}") from None
        except ValidationError:
            raise ValueError(f"{file}: not an evaluation; write one with specdec.train_eagle.evaluate") from None

    def save(self, folder: Path) -> None:
        """Write evaluation.json and evaluation.png."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        self._draw(folder / PICTURE)

    def tables(self) -> Iterator[Table]:
        """Yield the tables of tau and of accuracy."""
        columns = ("text", "temperature", "tree", "tau", "speed", "accepted at depth 1, 2, …", "tokens", "steps")
        tau = Table(*columns, title="drafts verified")
        tau.columns[2].no_wrap = True
        for row in self.measured:
            tau.add_row(*row.cells, f"{row.tokens:,}", f"{row.steps:,}")
        yield tau
        title = "the target's next token among the head's likeliest"
        accuracy = Table("text", "among", "at depth 1, 2, …", title=title)
        for domain, place, of_place in self.ranked():
            accuracy.add_row(domain, f"top {place}", format_shares(of_place))
        yield accuracy

    def ranked(self) -> Iterator[tuple[str, int, tuple[float, ...]]]:
        """Yield the domain, the number of likeliest tokens, and the accuracy at each depth."""
        for domain, by_depth in self.accuracy.items():
            for place, shares in enumerate(zip(*by_depth, strict=True), 1):
                yield domain, place, shares

    def _draw(self, picture: Path) -> None:
        figure, (accepted, accuracy) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
        deepest = max(len(by_depth) for by_depth in self.accuracy.values())
        temperatures = list(dict.fromkeys(row.temperature for row in self.measured))
        colours = {domain: f"C{number}" for number, domain in enumerate(self.accuracy)}
        for row in self.measured:
            style = STYLES[temperatures.index(row.temperature) % len(STYLES)]
            label = f"{row.domain}, temperature {row.temperature:g}: tau {row.tau:.2f} ({row.tree.in_words})"
            depths = range(1, len(row.accepted_per_depth) + 1)
            accepted.plot(depths, row.accepted_per_depth, style, color=colours[row.domain], label=label)
        for domain, place, shares in self.ranked():
            style = STYLES[(place - 1) % len(STYLES)]
            accuracy.plot(
                range(1, len(shares) + 1), shares, style, color=colours[domain], label=f"{domain}, top {place}"
            )
        accepted.set(title="share of steps that accept a draft of this depth", xlabel="depth", ylim=(0, 1))
        accuracy.set(title="share of next tokens among the head's likeliest", xlabel="depth", ylim=(0, 1))
        for axes in (accepted, accuracy):
            axes.set_xticks(range(1, deepest + 1))
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")
        figure.savefig(picture, dpi=100)
        plt.close(figure)
