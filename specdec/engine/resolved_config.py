"""Resolution of settings: the folders, device, dtype and tree shape that an engine gets."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from specdec.config import AUTO, DEMO, DEMO_HEAD, DEMO_HEADS, NGRAM, EngineConfig, default_shape, draft_names
from specdec.core.device import name_of, resolve_device, resolve_dtype
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.formats.block_settings import block_rows
from specdec.engine.llm_settings import engine_config
from specdec.engine.named_checkpoints import named_head, named_target
from specdec.models.hub import checkpoint_path, shown_path

logger = logging.getLogger(__name__)


class Sources(NamedTuple):
    """The target, and what drafts for it.

    Attributes:
        model: the target's folder.
        draft: folder of the draft model; None for none.
        ngrams: whether n-grams of the text are drafted.
    """

    model: Path
    draft: Path | None
    ngrams: bool


def resolved_config(model: str | Path | None, draft: str | Path | None, settings: Mapping[str, Any]) -> EngineConfig:
    """Resolve settings, so that none is "auto" or left open.

    Args:
        model, draft, settings: as `LLM` takes them.

    Raises:
        ValueError: an unknown setting, or one outside its range.
    """
    given = dict(settings)
    shape = given.pop("shape", None)
    if not isinstance(shape, DraftShape | Mapping | None):
        raise ValueError(f"shape is {shape!r}; it must be a DraftShape, some of its fields, or None")
    config = engine_config(DEMO / "target", None, given)
    device = resolve_device(config.device)
    if draft == AUTO:
        sources = _sources_of(DEMO / "target" if model is None else checkpoint_path(model, config.revision))
    else:
        sources = _given_sources(model, draft, config)
    if not isinstance(shape, DraftShape):
        rows = None if sources.draft is None else block_rows(sources.draft)
        # The levels are all drafted by one pass, so that none costs more.
        deepest = {} if rows is None else {"depth": rows}
        shape = replace(default_shape(device.type), **{**deepest, **(shape or {})})
    if config.verify == "block":
        # The rule takes chains alone.
        shape = replace(shape, branching=1, nodes=shape.depth)
    return replace(
        config,
        model=sources.model,
        draft=sources.draft,
        ngrams=sources.ngrams,
        tokenizer=None if config.tokenizer is None else checkpoint_path(config.tokenizer, weights=False),
        device=str(device),
        dtype=name_of(resolve_dtype(config.dtype, device)),
        shape=shape,
    )


def _sources_of(checkpoint: Path) -> Sources:
    """Return what a checkpoint implies: a head that names its target, a target with the head that it names, or n-grams.

    What was chosen is logged, but for the demo model.
    """
    name = shown_path(checkpoint)
    if target := named_target(checkpoint):
        logger.info("%s is a head: it drafts for the target that it names, %s", name, shown_path(target))
        return Sources(target, checkpoint, False)
    head = named_head(checkpoint)
    if head is None:
        logger.info("drafts: ngram (prompt lookup), since %s names no head; --draft takes one, or none", name)
    elif head != DEMO_HEAD:
        logger.info("drafts: %s, the head that %s names", shown_path(head), name)
    return Sources(checkpoint, head, head is None)


def _given_sources(model: str | Path | None, draft: str | Path | None, config: EngineConfig) -> Sources:
    """Return the draft sources that a user named, and the target: the user's, the head's, or the demo's."""
    head, ngrams = _draft_sources(draft, config.draft_revision, is_demo=model is None)
    if model is not None:
        return Sources(checkpoint_path(model, config.revision), head, ngrams)
    target = named_target(head) if head is not None else None
    return Sources(target or DEMO / "target", head, ngrams)


def _draft_sources(draft: str | Path | None, revision: str | None, is_demo: bool) -> tuple[Path | None, bool]:
    """Return the folder of the draft model, and whether n-grams of the text are drafted."""
    names = draft_names(draft)
    models = [name for name in names if name != NGRAM]
    if len(models) > 1 or len(names) - len(models) > 1:
        raise ValueError(f"draft is {str(draft)!r}; it may name one head or small model, and ngram")
    if not models:
        return None, bool(names)
    (name,) = models
    if name in ("", "none", AUTO):
        alone = name or "none"
        raise ValueError(f"draft is {str(draft)!r}; it must be {alone} alone, or sources separated by one comma")
    if name in DEMO_HEADS and not Path(name).is_dir():
        if not is_demo:
            raise ValueError(
                f"draft {name!r} is the demo model's own head; give the folder or hub name of this model's, ngram, "
                "none, or auto"
            )
        return DEMO_HEADS[str(name)], len(names) > 1
    return checkpoint_path(name, revision), len(names) > 1
