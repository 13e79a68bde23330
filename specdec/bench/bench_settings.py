"""Settings of a benchmark. Pure Python, so that the command line shows them without waiting for torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from specdec.kernels.types.settings import check_settings, setting


@dataclass(frozen=True)
class BenchSettings:
    """Settings of every benchmark, each with its help text."""

    PANEL: ClassVar[str] = "Benchmark"

    draft: Sequence[str] = setting(
        (),
        "A mode to measure beside plain decoding, with settings of its own (eagle:nodes=16,verify=rejection); "
        "repeatable; eagle (the demo's head), ngram, suffix, the folder of a head or small model, or eagle,ngram.",
        metavar="SOURCE[:KEY=VALUE,...]",
        short="-d",
        panel="Drafts",
        shown_default="SPECDEC_DRAFT, else eagle for the demo model, none for others",
    )
    dataset: str = setting(
        "demo",
        "demo, or a JSONL file: prompt, messages, conversation or turns (its first, as in Spec-Bench) in each line, or "
        "SPEED-Bench's; a category gives figures per category.",
        metavar="demo|FILE",
    )
    num_prompts: int | None = setting(None, "Most prompts of each category.", least=1, shown_default="all")
    output: Path | None = setting(
        None,
        "JSON file to write, with hardware, versions and commit.",
        metavar="FILE",
        shown_default="none",
        short="-o",
        panel="Output",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.output is not None and self.output.suffix.lower() != ".json":
            raise ValueError(f"output is {str(self.output)!r}; it must end with .json")


@dataclass(frozen=True)
class LatencySettings(BenchSettings):
    """Settings of a benchmark that measures time."""

    peer: Sequence[str] = setting(
        (),
        "Another engine to measure on the same checkpoint and prompts, at temperature 0; repeatable; transformers, "
        "llama-server, xllamacpp, openvino or vllm, with drafts if they are named (transformers:ngram).",
        metavar="NAME[:DRAFT][:KEY=VALUE,...]",
        shown_default="none",
    )
    rounds: int = setting(3, "Measured rounds; figures are medians over them.", least=1)
    warmup_rounds: int = setting(1, "Rounds before them that are not measured.", least=0)


@dataclass(frozen=True)
class ThroughputSettings(LatencySettings):
    """Settings of a benchmark with all prompts in one batch."""

    request_rate: float | None = setting(
        None, "Mean arrivals of prompts per second, by a Poisson process.", above=0, shown_default="all at once"
    )
