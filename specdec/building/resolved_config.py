"""Resolution of settings: the folders, device, dtype and tree shape that an engine gets."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from specdec.building.checkpoint_checks import check_draft, check_split, check_target
from specdec.building.draft_corpus import check_corpus
from specdec.building.llm_settings import engine_config
from specdec.building.named_checkpoints import HEADS, named_head, named_target, shipped_head
from specdec.building.plugins import import_plugins
from specdec.config import AUTO, DEMO, DEMO_HEAD, DEMO_HEADS, EngineConfig, default_shape, draft_names
from specdec.core.device import name_of, resolve_device, resolve_dtype
from specdec.draft_heads.drafting.chain_sources import NGRAM, SOURCES, SUFFIX, prepared_sources
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.formats.block_settings import block_rows
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.draft_heads.llama.unreadable_files import nearest_hint
from specdec.models.checkpoint import check_tokenizer
from specdec.models.hub import checkpoint_path, shown_path
from specdec.parallel.rank_layout import RankLayout
from specdec.verify.verifier import RULES

logger = logging.getLogger(__name__)
DRAFT_WORDS = (AUTO, NGRAM, SUFFIX, "none")


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
    config = engine_config(given)
    import_plugins(config.plugins)
    RULES.named(config.verify, "verify")
    device = resolve_device(config.device)
    config, sizes = _with_sources(model, draft, config)
    check_corpus(config.draft_corpus, is_used=config.drafts_from_store)
    tokenizer = config.tokenizer
    if tokenizer is not None:
        tokenizer = checkpoint_path(tokenizer, weights=False)
        check_tokenizer(tokenizer)
    if not isinstance(shape, DraftShape):
        rows = None if config.draft is None else block_rows(config.draft)
        # The levels are all drafted by one pass, so that none costs more.
        deepest, default = {} if rows is None else {"depth": rows}, default_shape(device.type)
        # No path of a tree may leave a window.
        nodes = min([default.nodes, *filter(None, sizes.layer_windows)])
        shape = replace(default, **{"nodes": nodes, **deepest, **(shape or {})})
    # Refuses wrong options before anything is loaded.
    prepared_sources(config.chains, shape, config.draft_options)
    dtype = name_of(resolve_dtype(config.dtype, device))
    return replace(config, tokenizer=tokenizer, device=str(device), dtype=dtype, shape=shape)


def _with_sources(
    model: str | Path | None, draft: str | Path | None, config: EngineConfig
) -> tuple[EngineConfig, LlamaConfig]:
    """Return the settings with the target and what drafts for it, which fit each other, and the target's sizes.

    No weights are read.
    """
    if model is None and config.revision is not None:
        raise ValueError(
            f"revision is {config.revision!r}, and no model is named; name it by model, or a head's by draft_revision"
        )
    if draft == AUTO:
        if config.draft_revision is not None:
            raise ValueError(
                f"draft_revision is {config.draft_revision!r}, and draft is {AUTO!r}; name a head or small model by "
                "draft, or leave the revision out"
            )
        checkpoint = DEMO / "target" if model is None else checkpoint_path(model, config.revision)
        named = named_target(checkpoint)
        target = named or checkpoint
        sizes = check_target(target)
        if named is None:
            head, chains = _automatic(target, sizes)
        else:
            head, chains = checkpoint, ()
            names = shown_path(head), shown_path(target)
            logger.info("%s is a head: it drafts for the target that it names, %s", *names)
    else:
        head, chains = _draft_sources(draft, config.draft_revision, is_demo=model is None)
        named = named_target(head) if model is None and head is not None else None
        target = checkpoint_path(model, config.revision) if model is not None else named or DEMO / "target"
        sizes = check_target(target)
    check_split(target, sizes, RankLayout(config.tensor_parallel_size, config.pipeline_parallel_size))
    if head is not None:
        try:
            kind = check_draft(head, target, sizes)
        except CheckpointError as error:
            # A head that cannot be read is no matter of its target.
            is_demo = model is None and target == DEMO / "target" and "the target's" in str(error)
            told = "; the target is the demo model, since no other is named" if is_demo else ""
            raise CheckpointError(f"{error}{told}") from None
        if config.speculative_method not in (None, kind):
            logger.warning(
                "speculative_config has method %r, and %s is a draft of the kind %s; it drafts as what it is",
                *(config.speculative_method, shown_path(head), kind),
            )
    return replace(config, model=target, draft=head, chains=chains), sizes


def _automatic(checkpoint: Path, sizes: LlamaConfig) -> tuple[Path | None, tuple[str, ...]]:
    """Return what drafts for a target: the head that it names, a shipped one that was made for it, or n-grams.

    What was chosen is logged, but for the demo model. The result is as that of `_draft_sources`.
    """
    name, head = shown_path(checkpoint), named_head(checkpoint)
    if head is not None:
        if head != DEMO_HEAD:
            logger.info("drafts: %s, the head that %s names", shown_path(head), name)
        return head, ()
    shipped = shipped_head(checkpoint, sizes)
    if shipped is not None and shipped.is_named:
        logger.info(
            "drafts: %s and ngram: the shipped head for %s, which %s is by its name and sizes; --draft takes another, "
            "or none",
            *(shipped.folder, shipped.made_for, name),
        )
        return shipped.folder, (NGRAM,)
    if shipped is not None:
        why = (
            f"names no head. The shipped one for {shipped.made_for} fits its sizes: if it is that model, give --draft "
            f"{shipped.folder},ngram"
        )
    elif HEADS.is_dir():
        why = f"names no head, and none in {HEADS} is for it; --draft takes one, or none"
    else:
        why = "names no head; --draft takes one, or none. Shipped heads are in specdec's repository alone, under heads/"
    logger.info("drafts: ngram (prompt lookup), since %s %s", name, why)
    return None, (NGRAM,)


def _draft_sources(
    draft: str | Path | None, revision: str | None, is_demo: bool
) -> tuple[Path | None, tuple[str, ...]]:
    """Return the folder of the draft model, and the names of the other draft sources."""
    names = draft_names(draft)
    chains = tuple(str(name) for name in names if name in SOURCES)
    models = [name for name in names if name not in SOURCES]
    # Suffix drafts n-grams too.
    is_doubled = len(set(chains)) < len(chains) or {NGRAM, SUFFIX} <= set(chains)
    if len(models) > 1 or is_doubled:
        hints = (nearest_hint(str(name), tuple(SOURCES)) for name in models)
        raise ValueError(
            f"draft is {str(draft)!r}; it may name one head or small model, and {' or '.join(sorted(SOURCES))}"
            f"{next(filter(None, hints), '')}"
        )
    if not models:
        if revision is not None:
            raise ValueError(
                f"draft_revision is {revision!r}, and draft {str(draft or 'none')!r} names no head or small model; "
                "leave the revision out"
            )
        return None, chains
    (name,) = models
    if name in ("", "none", AUTO):
        alone = name or "none"
        raise ValueError(f"draft is {str(draft)!r}; it must be {alone} alone, or sources separated by one comma")
    if name in DEMO_HEADS and not Path(name).is_dir():
        if not is_demo:
            raise ValueError(
                f"draft {name!r} is the demo model's own head; give the folder or hub name of this model's, ngram, "
                "suffix, none, or auto"
            )
        if revision is not None:
            raise ValueError(
                f"draft_revision is {revision!r}, and draft {name!r} is the demo model's own head; "
                "leave the revision out"
            )
        return DEMO_HEADS[str(name)], chains
    words = (*DRAFT_WORDS, *SOURCES, *(DEMO_HEADS if is_demo else ()), *map(str, HEADS.glob("*")))
    return checkpoint_path(name, revision, known=words), chains
