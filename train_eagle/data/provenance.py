"""Provenance of data, answers and heads, which each stage of training compares with its target."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.config import DEMO
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.models.head_fit import VOCABULARY, check_vocabulary
from specdec.models.hub import HUB_NAME, shown_name, shown_path
from specdec.train_eagle.data.chat_mask import Sample
from specdec.train_eagle.data.prepared_data import INDEX, PreparedData

# Of each file of weights, as many bytes tell models apart.
SAMPLED_BYTES = 1 << 20
WEIGHTS = (".safetensors", ".bin", ".gguf")
JOURNAL = ".journal"


def file_digest(path: Path, suffixes: Sequence[str] = (*WEIGHTS, ".json", ".jinja", ".model")) -> str:
    """Return a short hash of a checkpoint's files with these suffixes; of large ones, of their sizes and beginnings."""
    found = hashlib.sha256()
    files = [file for file in sorted(path.iterdir()) if file.is_file()] if path.is_dir() else [path]
    for file in files:
        if file.suffix in suffixes:
            with file.open("rb") as content:
                found.update(f"{file.name} {file.stat().st_size} ".encode() + content.read(SAMPLED_BYTES))
    return found.hexdigest()[:12]


def named_digest(model: Path) -> str:
    """Return a model's short name and the hash of its files."""
    return f"{shown_name(model)} ({file_digest(model)})"


def target_name(model: Path) -> str:
    """Return the name by which others know a target: that on the hub, or that of its folder; never a path."""
    if model == DEMO / "target":
        return "specdec/demo/target"
    if not model.exists() and HUB_NAME.fullmatch(str(model)):
        return str(model)
    return shown_name(model)


def data_digests(folders: Sequence[Path]) -> list[str]:
    """Return the names of folders of prepared data, each with a hash of its index and the sizes of its files."""
    return [f"{folder.name} ({_data_digest(folder)})" for folder in folders]


def _data_digest(folder: Path) -> str:
    found = hashlib.sha256((folder / INDEX).read_bytes())
    for shard in PreparedData(folder).shards:
        found.update(f"{shard.file} {(folder / shard.file).stat().st_size} ".encode())
    return found.hexdigest()[:12]


def check_data(folder: Path, samples: Sequence[Sample], target: Path, sizes: LlamaConfig) -> None:
    """Check that prepared data, or requests that an engine kept, have the tokens of a target and fit its positions.

    Args:
        sizes: the target's.

    Raises:
        ValueError: another tokenizer, which is named with the target's, a token that the target does not have, or a
            conversation longer than its positions.
    """
    settings = PreparedData(folder).settings
    check_vocabulary(f"--data {folder}", settings.get("model"), settings.get(VOCABULARY), target)
    largest = max((max(sample.token_ids) for sample in samples), default=0)
    if largest >= sizes.vocab_size:
        made = f"made for {settings.get('model') or 'another target'}, has token {largest}"
        remedy = "give the data's target by --model, or prepare the data with this one"
        raise ValueError(f"--data {folder}: {made}; {shown_path(target)} has {sizes.vocab_size} tokens; {remedy}")
    longest = max((len(sample.token_ids) for sample in samples), default=0)
    if longest > sizes.max_position:
        remedy = f"prepare it anew with --max-length {sizes.max_position}"
        has = f"{shown_path(target)} has {sizes.max_position} positions"
        raise ValueError(f"--data {folder}: has a conversation of {longest} tokens; {has}; {remedy}")


def check_answers(source: str | Path, target: Path) -> None:
    """Check that answers that `specdec regenerate` made are of a target with the tokens of this one.

    A file without a journal beside it is text of any origin.

    Raises:
        ValueError: names both targets.
    """
    journal = Path(f"{source}{JOURNAL}")
    settings = journal_settings(journal) if journal.is_file() else {}
    made_for = str(settings.get("model")).partition(" (")[0]
    check_vocabulary(f"--data {source}", made_for, settings.get(VOCABULARY), target)


def journal_settings(journal: Path) -> Mapping[str, Any]:
    """Return the settings in the first line of a journal of answers; none if there is no such line."""
    with journal.open("rb") as lines:
        first = lines.readline()
    try:
        settings = json.loads(first)["settings"]
    except (ValueError, LookupError, TypeError):
        return {}
    return settings if isinstance(settings, dict) else {}
