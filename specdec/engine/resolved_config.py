"""Resolution of settings: the folders, device, dtype and tree shape that an engine gets."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from specdec.config import DEMO, DEMO_HEAD, NGRAM, EngineConfig, default_shape, draft_names, engine_config
from specdec.core.device import name_of, resolve_device, resolve_dtype
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.engine.draft_loader import named_target
from specdec.models.hub import checkpoint_path


def resolved_config(model: str | Path | None, draft: str | Path | None, settings: Mapping[str, Any]) -> EngineConfig:
    """Resolve settings, so that none is "auto" or left open.

    Args:
        model, draft, settings: as `LLM` takes them.

    Raises:
        TypeError: an unknown setting.
        ValueError: a setting outside its range.
    """
    given = dict(settings)
    shape = given.pop("shape", None)
    if not isinstance(shape, DraftShape | None):
        raise ValueError(f"shape is {shape!r}; it must be a DraftShape, or None for the device's default")
    config = engine_config(DEMO / "target", None, given)
    device = resolve_device(config.device)
    drafts, ngrams = _draft_sources(draft, config.draft_revision, is_demo=model is None)
    shape = shape or default_shape(device.type)
    if config.verify == "block":
        # The rule takes chains alone.
        shape = replace(shape, branching=1, nodes=shape.depth)
    if model is not None:
        target = checkpoint_path(model, config.revision)
    else:
        target = (named_target(drafts) if drafts is not None else None) or DEMO / "target"
    return replace(
        config,
        model=target,
        draft=drafts,
        ngrams=ngrams,
        device=str(device),
        dtype=name_of(resolve_dtype(config.dtype, device)),
        shape=shape,
    )


def _draft_sources(draft: str | Path | None, revision: str | None, is_demo: bool) -> tuple[Path | None, bool]:
    """Return the folder of the draft model, and whether n-grams of the text are drafted."""
    names = draft_names(draft)
    models = [name for name in names if name != NGRAM]
    if len(models) > 1 or len(names) - len(models) > 1:
        raise ValueError(f"draft is {str(draft)!r}; it may name one head or small model, and ngram")
    if not models:
        return None, bool(names)
    (name,) = models
    if name in ("", "none"):
        raise ValueError(f"draft is {str(draft)!r}; it must be none alone, or sources separated by one comma")
    if name == "eagle":
        if not is_demo:
            raise ValueError("draft 'eagle' is the demo model's own head; give the folder of this model's, or none")
        return DEMO_HEAD, len(names) > 1
    return checkpoint_path(name, revision), len(names) > 1
