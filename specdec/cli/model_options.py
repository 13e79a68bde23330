"""Options of the commands that generate text with one engine in this process: model, draft, and all settings."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from specdec.building.llm_settings import engine_config, sharing_a_gpu
from specdec.cli.options import options_for
from specdec.config import EngineConfig, default_shape
from specdec.core.garbage import loading
from specdec.core.request_limits import RequestLimits
from specdec.core.sampling_params import SamplingParams
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.scheduling.scheduler_config import SchedulerConfig

if TYPE_CHECKING:
    from specdec.llm import LLM

# Those of the engine.
ENGINE_OWNERS = (EngineConfig, SchedulerConfig, RequestLimits)
OWNERS = (SamplingParams, DraftShape, *ENGINE_OWNERS)
# Where neither an option nor the model's generation_config.json says otherwise.
OWN_DEFAULTS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 256}
SHAPE_DEFAULTS = dict.fromkeys(("depth", "branching", "nodes", "min_reach"), "by device")
SHOWN_DEFAULTS = {
    **SHAPE_DEFAULTS,
    **{name: "the model's, else " + value for name, value in {"top_p": "1", "min_p": "0", "top_k": "0"}.items()},
    **{name: f"the model's, else {value:g}" for name, value in OWN_DEFAULTS.items()},
    "repetition_penalty": "the model's, else 1",
    "stop": "the model's",
}
# What was found by its revision is a folder.
NO_REVISIONS: dict[str, Any] = {"revision": None, "draft_revision": None}
DRAFT_HELP = (
    "auto (the head that the model's config.json or card names, or that heads/ has for it, else ngram), eagle (which "
    "is eagle3) or dspark (the demo's heads), a head or small model by its folder or its org/name on the hub, ngram, "
    "suffix (n-grams and earlier requests), one of these and ngram or suffix (eagle,suffix), or none; default: auto."
)
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        envvar="SPECDEC_MODEL",
        rich_help_panel="Model",
        help="The target: a checkpoint folder, a GGUF file, or org/name on the Hugging Face hub; default: demo model.",
    ),
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        rich_help_panel="Model",
        help="Use the chat template, or the prompt as it is; default: chat if it can.",
    ),
]
Draft = Annotated[
    str,
    typer.Option(
        "--draft",
        "-d",
        metavar="TEXT",
        rich_help_panel="Drafts",
        envvar="SPECDEC_DRAFT",
        show_default=False,
        help=DRAFT_HELP,
    ),
]


def engine_options(options: Mapping[str, Any], also: Collection[str] = ()) -> dict[str, Any]:
    """Return those of the given options that are settings of the engine; see `with_options`."""
    return {name: value for owner in ENGINE_OWNERS for name, value in options_for(owner, options, also).items()}


def check_engine(shape: Mapping[str, Any], settings: dict[str, Any]) -> None:
    """Check given fields of `DraftShape` and settings of the engine, before torch is imported, which takes seconds.

    Raises:
        ValueError: a value outside its range.
    """
    replace(default_shape("cpu"), **shape)
    engine_config(settings)


@dataclass(frozen=True)
class ModelOptions:
    """Checked options, from which the engine and the sampling parameters are made.

    Attributes:
        model, draft: as `LLM` takes them.
        sampling: the given fields of `SamplingParams`.
        shape: the given fields of `DraftShape`.
        settings: the given settings of `LLM`, but for the shape.
    """

    model: str | Path | None
    draft: str | None
    sampling: dict[str, Any]
    shape: dict[str, Any]
    settings: dict[str, Any]

    @classmethod
    def of(cls, model: str | None, draft: str, options: Mapping[str, Any]) -> Self:
        """Check the options of a command, without importing torch, which takes seconds.

        Raises:
            ValueError: a value outside its range.
        """
        sampling, shape = options_for(SamplingParams, options), options_for(DraftShape, options)
        settings = engine_options(options)
        # The model may allow more tokens than the command does by itself.
        SamplingParams(**{**OWN_DEFAULTS, "max_tokens": None, **sampling})
        check_engine(shape, settings)
        return cls(model, draft, sampling, shape, settings)

    @loading()
    def load(self) -> "LLM":
        """Load the model and build its engine.

        Raises:
            ValueError: see `LLM`.
        """
        from specdec.cli.startup import spinner

        with spinner("importing torch"):
            from specdec.building.resolved_config import resolved_config
            from specdec.llm import LLM
            from specdec.models.checkpoint import check_tokenizer

        settings = {**self.settings, "shape": self.shape}
        # Apart, since downloads have progress bars of their own.
        config = resolved_config(self.model, self.draft, settings)
        # Commands take text.
        check_tokenizer(config.tokenizer or config.model)
        with spinner("loading the model"):
            return LLM(config.model, config.sources, **{**settings, **NO_REVISIONS})

    def sharing_a_gpu(self, number: int, count: int) -> Self:
        """Return the same options for one of several engines of this process; see `llm_settings.sharing_a_gpu`."""
        return replace(self, settings=sharing_a_gpu(self.settings, number, count))

    def without_drafts(self, model: Path) -> Self:
        """Return the same options for plain decoding with a target that was found."""
        return replace(self, model=model, draft=None, settings={**self.settings, **NO_REVISIONS})

    def params(self, llm: "LLM") -> SamplingParams:
        """Return the sampling parameters: those given, then the model's, then the commands' own."""
        return SamplingParams(**{**OWN_DEFAULTS, **llm.generation_config.params, **self.sampling})
