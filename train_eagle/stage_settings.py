"""Settings of the stages of training beside `TrainConfig`. Pure Python, so that the command line shows them at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specdec.kernels.settings import check_settings, setting

Long = Literal["truncate", "skip"]


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """Where conversations come from."""

    data: Sequence[str] = setting(
        help="JSONL files, JSON arrays, or data sets as NAME:SPLIT; several may follow.", metavar="FILE|NAME"
    )
    limit: int | None = setting(None, "Most entries of each source.", least=1, shown_default="all")
    strict: bool = setting(False, "Refuse the first bad conversation.", flags="--strict")

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, kw_only=True)
class RegenerateSettings(SourceSettings):
    """Settings of the answers beside those of sampling, which `SamplingParams` declares."""

    out: Path = setting(help="JSONL file to write.", metavar="FILE")
    temperature: Sequence[float] = setting(
        (0.0,), "Temperatures, given to conversations in turn; several may follow.", shown_default="0"
    )
    max_tokens: int = setting(1024, "Most tokens of an answer; one that is longer is left out and counted.", least=1)
    seed: int = setting(0, "Seed of the sampling.", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for temperature in self.temperature:
            if not 0 <= temperature < float("inf"):
                raise ValueError(f"temperature is {temperature:g}; it must be 0 or more")
