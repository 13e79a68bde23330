"""Settings of a training run from a YAML file and from options."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from specdec.kernels.types.settings import one_line
from specdec.train_eagle.training.train_config import RECIPES, TrainConfig, listed
from specdec.train_eagle.training.training_kinds import TRAINING_KINDS

_CONFIG = TypeAdapter(TrainConfig)


def read_config(given: Mapping[str, Any], file: Path | None = None) -> TrainConfig:
    """Read settings by name; those of the YAML file are overridden by those given.

    Raises:
        ValueError: names a setting that is unknown, missing or out of its range, or the file.
    """
    settings = {**(_settings(file) if file else {}), **given}
    try:
        config = _CONFIG.validate_python(settings)
    except ValidationError as error:
        raise ValueError("; ".join(_told(problem) for problem in error.errors())) from None
    if config.head not in TRAINING_KINDS:
        raise ValueError(f"head is {config.head!r}; it must be one of {', '.join(TRAINING_KINDS)}")
    for name in sorted(set().union(*(kind.settings for kind in TRAINING_KINDS.values()))):
        if getattr(config, name) and name not in TRAINING_KINDS[config.head].settings:
            kinds = [other for other, kind in TRAINING_KINDS.items() if name in kind.settings]
            raise ValueError(f"{name} is for {listed(kinds)} heads; leave it out of a run for {config.head}")
    return config


def recipe(head: str) -> dict[str, Any]:
    """Return the settings of a kind of head where none are given; a new kind takes those of EAGLE-3."""
    return RECIPES.get(head, RECIPES["eagle3"])


def _settings(file: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise ValueError(f"{file}: cannot be read: {reason}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file}: not a YAML mapping of settings")
    return values


def _told(problem: Any) -> str:
    name = ".".join(str(part) for part in problem["loc"])
    match problem["type"]:
        case "unexpected_keyword_argument":
            return f"{name} is no setting of a training run"
        case "missing" | "missing_keyword_only_argument" | "missing_argument":
            return f"{name} is missing"
        case "value_error":
            return str(problem["ctx"]["error"])
        case _:
            return f"{name} is {problem['input']!r}: {problem['msg']}"
