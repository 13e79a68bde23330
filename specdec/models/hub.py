"""Checkpoints by name: a local folder or GGUF file, a packaged model, or one on the hub, which are fetched once."""

import logging
import re
from collections.abc import Iterable
from pathlib import Path

from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.draft_heads.llama.unreadable_files import missing_path, nearest_path_hint
from specdec.draft_heads.llama.weight_files import FOREIGN, INDEX, WEIGHTS, has_weights, shard_names
from specdec.gguf.file import is_gguf
from specdec.kernels.types.settings import one_line
from specdec.models.packaged import PACKAGED, packaged_model

logger = logging.getLogger(__name__)

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
# Everything but the weights. Pickles and code are never downloaded.
SMALL_FILES = [
    "config.json",
    "generation_config.json",
    "README.md",
    INDEX,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
]
_PREFIX = "models--"


def checkpoint_path(
    name: str | Path,
    revision: str | None = None,
    beside: Path | None = None,
    weights: bool = True,
    known: Iterable[str] = (),
) -> Path:
    """Return the folder or file of a checkpoint; download it if it is on the hub and not yet in the cache.

    A local path wins over a model of the same name on the hub. A model in the cache is used without asking the hub.

    Args:
        name: a path, `org/name` on the hub, or one of `PACKAGED`.
        revision: branch, tag or commit on the hub; None for its main branch.
        beside: a folder from which a relative path may lead too, before the working folder.
        weights: whether the weights are needed too.
        known: words that may stand in place of a path, among which the nearest to a mistyped one is told.

    Raises:
        CheckpointError: no such path, with the nearest that there is; or the model is neither in the cache nor to be
            had from the hub, with the reason; or a revision of a local folder.
    """
    if name == "":
        raise CheckpointError("'' is no checkpoint; give a folder, a GGUF file, or org/name on the hub")
    for path in (*([beside / name] if beside is not None else []), Path(name)):
        if path.exists():
            if revision is not None:
                raise CheckpointError(
                    f"revision is {revision!r}, but {path} is a local path; leave the revision out, or rename the path"
                )
            return path
    if revision is None and (packaged := packaged_model(str(name))) is not None:
        return packaged
    if is_gguf(Path(name)) or not HUB_NAME.fullmatch(str(name)):
        what = "file" if is_gguf(Path(name)) else "folder"
        missing = missing_path(Path(name), what, [*known, *PACKAGED, *_cached_names()])
        is_word = "/" not in str(name) and missing.endswith("no such folder")
        raise CheckpointError(missing + "; a model on the hub has a name like org/name" * is_word)
    return _from_hub(str(name), revision, weights, known)


def _cached_names() -> list[str]:
    """Return the names of the models that the hub's cache holds."""
    from huggingface_hub import constants

    folders = Path(constants.HF_HUB_CACHE).glob(f"{_PREFIX}*")
    return [folder.name.removeprefix(_PREFIX).replace("--", "/", 1) for folder in folders]


def hub_name(path: Path) -> str | None:
    """Return the name of a folder in the hub's cache, `models--ORG--NAME/snapshots/COMMIT`; None for any other path."""
    kept = path.parents[1].name if path.parent.name == "snapshots" else ""
    return kept.removeprefix(_PREFIX).replace("--", "/", 1) if kept.startswith(_PREFIX) else None


def shown_name(path: Path) -> str:
    """Return the short name of a checkpoint: its name on the hub, or the folder's or file's own."""
    return hub_name(path) or (path.stem if is_gguf(path) else path.resolve().name)


def shown_path(path: Path) -> str:
    """Return how to speak of a checkpoint to the user: by its name on the hub, or by its path."""
    return hub_name(path) or str(path)


def _from_hub(name: str, revision: str | None, weights: bool, known: Iterable[str]) -> Path:
    cached = _cached(name, revision, weights)
    if cached is not None and (not weights or (cached / "tokenizer.json").is_file()):
        return cached
    try:
        folder = _download(name, revision, SMALL_FILES)
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                f"{name}: no config.json on the hub; a GGUF file there is fetched by: hf download {name} FILE.gguf"
            )
        if weights and not has_weights(folder):
            logger.info("downloading %s from the hub", name)
            _download_weights(name, folder)
    except CheckpointError:
        raise
    except Exception as error:  # the hub's errors, those of the HTTP library, and those of the disk
        # A head in the cache has no tokenizer to wait for.
        if cached is not None:
            return cached
        # A path of two parts looks like a name.
        hint = nearest_path_hint(Path(name), known=[*known, *_cached_names()])
        raise CheckpointError(_reason(name, revision, error) + hint) from None
    return folder


def _cached(name: str, revision: str | None, weights: bool) -> Path | None:
    """Return the model's folder in the cache if it is complete but for the tokenizer, which a head does not have."""
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = _download(name, revision, ["config.json"], local_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return folder if (folder / "config.json").is_file() and (not weights or has_weights(folder)) else None


def _download_weights(name: str, folder: Path) -> None:
    """Download the weights of the commit whose other files lie in a folder of the cache."""
    commit = folder.name
    if (folder / INDEX).is_file():
        _download(name, commit, shard_names(folder / INDEX))
        return
    _download(name, commit, [WEIGHTS])
    if not (folder / WEIGHTS).is_file():
        _download(name, commit, ["*.safetensors"], ignored=["*/*", *FOREIGN])
    if not has_weights(folder):
        raise CheckpointError(
            f"{name}: no *.safetensors on the hub, and pickles are never downloaded; take a converted checkpoint, "
            f"or run: hf download {name} and give its folder"
        )


def _download(
    name: str, revision: str | None, files: list[str], ignored: list[str] | None = None, local_only: bool = False
) -> Path:
    # Late, here as above: the library takes a while to import, and most starts do not need it.
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            name, revision=revision, allow_patterns=files, ignore_patterns=ignored, local_files_only=local_only
        )
    )


def _reason(name: str, revision: str | None, error: Exception) -> str:
    """Return why the hub did not give a model, in one line with the remedy."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    wanted = name if revision is None else f"{name} --revision {revision}"
    if isinstance(error, GatedRepoError):
        return f"{name}: gated on the hub; ask for access on its page, and run: hf auth login"
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        return f"{name}: no such folder, and no such model on the hub; a private one needs: hf auth login"
    if isinstance(error, RevisionNotFoundError):
        return f"{name}: no revision {revision!r} on the hub; name a branch, a tag or a commit"
    if constants.HF_HUB_OFFLINE:
        return f"{name}: no such folder, not in the hub's cache, and HF_HUB_OFFLINE is set; run: hf download {wanted}"
    cause = one_line(error.__cause__ if isinstance(error.__cause__, Exception) else error)
    return (
        f"{name}: no such folder, not in the hub's cache, and it cannot be downloaded ({cause}); "
        f"where the hub can be reached, run: hf download {wanted}"
    )
