"""Modes to compare, as the command line names them: `NAME[:KEY=VALUE,...]`. Pure Python."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_origin

from specdec.config import EngineConfig
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.kernels.types.settings import kinds_of, settings_of, size_in_bytes
from specdec.scheduling.scheduler_config import SchedulerConfig

PLAIN = "plain"
SWITCH = {"on": True, "true": True, "off": False, "false": False}


@dataclass(frozen=True)
class Mode:
    """One mode of the engine in a comparison.

    Attributes:
        label: how the user wrote it.
        draft: source of the drafts, as `LLM` takes it; None for plain decoding.
        shape: bounds of draft trees that differ from the run's.
        settings: other settings of the engine that differ from the run's.
    """

    label: str
    draft: str | None
    shape: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


def parse_modes(drafts: Sequence[str]) -> list[Mode]:
    """Return plain decoding and one mode for each source of drafts.

    Raises:
        ValueError: an unknown setting, a bad value, or the same mode twice.
    """
    modes = [Mode(PLAIN, None), *(_parse_mode(text) for text in drafts)]
    check_labels([mode.label for mode in modes], "--draft")
    return modes


def check_labels(labels: Sequence[str], option: str) -> None:
    """Refuse the same mode twice.

    Raises:
        ValueError: names it.
    """
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise ValueError(f"{option} {twice!r} is given twice; leave one out, or give each its own settings")


def split_settings(text: str, option: str) -> tuple[str, dict[str, str]]:
    """Split off the settings behind the last colon, if there are any; a path may hold colons too.

    Raises:
        ValueError: a part that is no setting.
    """
    head, colon, tail = text.rpartition(":")
    if not colon or "=" not in tail:
        return text, {}
    settings = {}
    for part in tail.split(","):
        key, equals, value = part.partition("=")
        if not (key and equals and value):
            raise ValueError(f"{option} {text!r}: {part!r} is no setting; write KEY=VALUE, separated by commas")
        settings[key.replace("-", "_")] = value
    return head, settings


def _parse_mode(text: str) -> Mode:
    head, given = split_settings(text, "--draft")
    if not head:
        raise ValueError(
            f"--draft is {text!r}; it must be eagle, ngram, suffix, or a folder, or eagle,ngram, with or without "
            "settings"
        )
    source, colon, tail = head.rpartition(":")
    # Of a path, checkpoint errors say more.
    if not given and colon and "/" not in head and not Path(head).exists():
        raise ValueError(f"--draft {text!r}: {tail!r} is no setting of {source}; write KEY=VALUE, separated by commas")
    mode = Mode(text, None if head in ("none", PLAIN) else head)
    if mode.draft is None and not given:
        raise ValueError(f"--draft {text!r}: plain decoding is always measured; leave it out")
    fields = {
        name: (owner, each, facts)
        for owner in (DraftShape, EngineConfig, SchedulerConfig)
        for name, (each, facts) in settings_of(owner).items()
        if facts.flags != ""
    }
    for name, value in given.items():
        if name not in fields:
            raise ValueError(f"--draft {text!r}: no setting is called {name!r}; it must be one of {', '.join(fields)}")
        owner, each, facts = fields[name]
        kept = mode.shape if owner is DraftShape else mode.settings
        kept[name] = size_in_bytes(name, value) if facts.is_size else _value(text, name, value, kinds_of(each.type))
    return mode


def _value(text: str, name: str, value: str, kinds: Sequence[Any]) -> Any:
    """Return a setting's value; its range is checked where the engine is configured."""
    simple = [kind for kind in kinds if get_origin(kind) is None and kind is not type(None)]
    if simple == [bool]:
        if value.lower() not in SWITCH:
            raise ValueError(f"--draft {text!r}: {name} is {value!r}; it must be on or off")
        return SWITCH[value.lower()]
    if len(simple) != 1 or simple[0] not in (int, float):
        return value
    try:
        return simple[0](value)
    except ValueError:
        raise ValueError(f"--draft {text!r}: {name} is {value!r}; it must be a number") from None
