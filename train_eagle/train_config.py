"""Settings of a training run."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specdec.config import DEMO
from specdec.draft_heads.llama.checkpoint_files import first_line
from specdec.train_eagle.training_kinds import TRAINING_KINDS
from specdec.train_eagle.unrolled_loss import LossKind


class TrainConfig(BaseModel):
    """Settings from a YAML file and from flags, which win. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: Path = Field(DEMO / "target", description="the target: a folder, or org/name on the hub")
    data: list[Path] = Field(description="folders of conversations that specdec.train_eagle.prepare wrote")
    out: Path = Field(description="folder of the head to write, with the run's state and logs")
    features: Path | None = Field(None, description="folder to store the target's states in; none to compute them anew")
    head: str = Field("eagle3", description=f"kind of head: {', '.join(TRAINING_KINDS)}")
    start: Path | None = Field(None, description="folder of a run whose head is the starting point of this one")
    draft_vocab_size: int = Field(0, ge=0, description="number of tokens that the head can propose, 0 for all")
    held_out: int = Field(100, ge=1, description="conversations for validation")

    epochs: int = Field(10, ge=1, description="passes over the data")
    batch_tokens: int = Field(8192, ge=1, description="most tokens of a batch on one device")
    accumulate: int = Field(1, ge=1, description="batches per device and optimizer step")
    lr: float = Field(1e-4, gt=0, description="highest learning rate")
    warmup_steps: int = Field(50, ge=1, description="steps up to the highest learning rate")
    clip_norm: float = Field(1.0, gt=0, description="gradients are scaled down to this norm")
    mixed_precision: Literal["auto", "bf16", "no"] = Field("auto", description="over float32 weights")
    gradient_checkpointing: bool = Field(False, description="recompute each pass for its gradient, to save memory")
    seed: int = Field(0, ge=0, description="seed of initial weights, noise and order of the data")

    loss: LossKind = Field("ce", description="between the target's and the head's next-token distribution")
    unroll: int = Field(7, ge=1, le=16, description="passes over a batch; all but the first read the head's own states")
    step_decay: float = Field(0.8, gt=0, le=1, description="weight of each pass relative to the one before")
    token_weight: float = Field(1.0, ge=0, description="weight of that loss")
    feature_weight: float = Field(0.0, ge=0, description="weight of the smooth L1 distance of features (EAGLE-1)")
    noise: float = Field(0.0, ge=0, description="amplitude of uniform noise added to features (EAGLE-1: 0.1)")

    checkpoint_minutes: float = Field(3.0, gt=0, description="minutes between saved states of the run")
    evaluate_every: float = Field(1.0, gt=0, description="epochs between evaluations by the engine")
    evaluate_prompts: int = Field(40, ge=0, description="held-out conversations answered at each; 0 for the last head")

    @classmethod
    def parse(cls, arguments: Sequence[str] | None, description: str | None) -> "TrainConfig":
        """Read a command line: `--config FILE` and a flag for each setting.

        Raises:
            ValueError: names a setting that is unknown, missing or out of its range.
        """
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--config", type=Path, help="YAML file of these settings")
        for name, field in cls.model_fields.items():
            shown = field.description or ""
            if not field.is_required() and field.default is not None:
                shown = f"{shown} (default: {field.default})".strip()
            many: dict[str, Any] = {"nargs": "+"} if name == "data" else {}
            flag = f"--{name.replace('_', '-')}"
            parser.add_argument(flag, dest=name, default=argparse.SUPPRESS, help=shown.replace("%", "%%"), **many)
        given = vars(parser.parse_args(arguments))
        file = given.pop("config")
        return cls.read({**_settings(file), **given} if file else given)

    @classmethod
    def read(cls, settings: dict[str, Any]) -> "TrainConfig":
        """Read settings by name.

        Raises:
            ValueError: as in `parse`.
        """
        try:
            config = cls.model_validate(settings)
        except ValidationError as error:
            raise ValueError("; ".join(_told(problem) for problem in error.errors())) from None
        if config.head not in TRAINING_KINDS:
            raise ValueError(f"head is {config.head!r}; it must be one of {', '.join(TRAINING_KINDS)}")
        for name in sorted(set().union(*(kind.settings for kind in TRAINING_KINDS.values()))):
            if getattr(config, name) and name not in TRAINING_KINDS[config.head].settings:
                kinds = " and ".join(other for other, kind in TRAINING_KINDS.items() if name in kind.settings)
                raise ValueError(f"{name} is for {kinds} heads; leave it out of a run for {config.head}")
        return config


def _settings(file: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{file}: cannot be read: {first_line(error)}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file}: not a YAML mapping of settings")
    return values


def _told(problem: Any) -> str:
    name = ".".join(str(part) for part in problem["loc"])
    match problem["type"]:
        case "extra_forbidden":
            return f"{name} is no setting of a training run"
        case "missing":
            return f"{name} is missing"
        case _:
            return f"{name} is {problem['input']!r}: {problem['msg']}"
