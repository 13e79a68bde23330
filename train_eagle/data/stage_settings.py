"""Settings of the stages of training beside `TrainConfig`. Pure Python, so that the command line shows them at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from specdec.config import DTYPES
from specdec.kernels.types.settings import check_settings, setting

Long = Literal["truncate", "skip"]
HeadLayout = Literal["official", "speculators"]


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """Sources of conversations."""

    PANEL: ClassVar[str] = "Data"

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

    out: Path = setting(help="JSONL file to write.", metavar="FILE", short="-o", panel="Output")
    temperature: Sequence[float] = setting(
        (0.0,),
        "Temperatures, given to conversations in turn; several may follow.",
        shown_default="0",
        short="-t",
        panel="Sampling",
    )
    max_tokens: int = setting(
        1024,
        "Most tokens of an answer; one that is longer is left out and counted.",
        least=1,
        short="-n",
        panel="Sampling",
    )
    keep_cut: bool = setting(
        False,
        "Keep the beginning of a longer answer, as the last of its conversation.",
        flags="--keep-cut/--leave-out-cut",
        panel="Sampling",
    )
    seed: int = setting(0, "Seed of the sampling.", least=0, short="-s", panel="Sampling")

    def __post_init__(self) -> None:
        super().__post_init__()
        for temperature in self.temperature:
            if not 0 <= temperature < float("inf"):
                raise ValueError(f"temperature is {temperature:g}; it must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class PrepareSettings(SourceSettings):
    """Settings of tokenising."""

    out: Path = setting(help="Folder to write.", metavar="FOLDER", short="-o", panel="Output")
    max_length: int = setting(2048, "Most tokens of a conversation.", least=2)
    long: Long = setting("truncate", "What to do with longer ones.")
    processes: int | None = setting(
        None,
        "Processes that tokenise.",
        least=1,
        shown_default="one per processor where there are many conversations",
    )
    preview: int = setting(0, "Show the first N conversations, what is trained on marked.", least=0)


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings(SourceSettings):
    """Settings of an evaluation, beside the shape of its trees."""

    data: Sequence[str] = setting(
        help="JSONL files or data sets, each with a name for its kind of text; several may follow.", metavar="NAME=FILE"
    )
    limit: int | None = setting(100, "Most entries of each source.", least=1)
    out: Path = setting(help="Folder to write.", metavar="FOLDER", short="-o", panel="Output")
    temperatures: Sequence[float] = setting(
        (0.0, 1.0), "Temperatures to measure at; several may follow.", shown_default="0 1", short="-t", panel="Sampling"
    )
    max_tokens: int = setting(128, "Most tokens of an answer.", least=1, short="-n", panel="Sampling")
    speed_prompts: int = setting(
        8, "Prompts of each kind of text answered one at a time, with drafts and without, for the speed.", least=0
    )
    dtype: str = setting("auto", "Precision of target and head.", choices=DTYPES, panel="Model")


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """Settings of a published head."""

    PANEL: ClassVar[str] = "Output"

    run: Path | None = setting(None, "Folder of a training run's state, HEAD/run.", metavar="FOLDER", panel="Model")
    draft: Path | None = setting(
        None, "Folder of a head, where there is no --run.", metavar="FOLDER", short="-d", panel="Model"
    )
    out: Path = setting(help="Folder to write.", metavar="FOLDER", short="-o", panel="Output")
    model: Path | None = setting(
        None,
        "Checkpoint folder of the target.",
        metavar="FOLDER",
        shown_default="what the run or the head says",
        short="-m",
        panel="Model",
    )
    evaluation: Path | None = setting(None, "evaluation.json, for the model card.", metavar="FILE")
    base_model: str | None = setting(
        None, "Name of the target in the model card.", metavar="NAME", shown_default="its folder"
    )
    licence: str | None = setting(None, "Licence of the head, for the model card.")
    notes: Path | None = setting(None, "Markdown for the model card, such as about the data.", metavar="FILE")
    dtype: Literal["bfloat16", "float32"] = setting("bfloat16", "Type of the weights.")
    layout: HeadLayout = setting(
        "official", "Layout of the folder; speculators', which vLLM reads too, is for DFlash and DSpark heads."
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if (self.run is None) == (self.draft is None):
            raise ValueError("give the head by one of --run and --draft")
