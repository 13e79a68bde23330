"""`--lora-modules`. Pure Python, so that the command line reports mistakes at once."""

import json
from collections.abc import Sequence
from typing import Any

_KEYS = ("name", "path", "base_model_name")


def read_lora_modules(given: Sequence[str]) -> dict[str, str]:
    """Return the folders of adapters by their names.

    Args:
        given: `NAME=FOLDER` each, or vLLM's JSON object with `name`, `path` and perhaps `base_model_name`.

    Raises:
        ValueError: one of another form, or a name that is given twice.
    """
    found: dict[str, str] = {}
    for each in given:
        name, path = (
            _from_json(each) if each.lstrip().startswith("{") else each.split("=", 1) if "=" in each else ("", "")
        )
        if not name or not path:
            raise ValueError(f"lora_modules holds {each!r:.100}; it must be NAME=FOLDER, or JSON with name and path")
        if name in found:
            raise ValueError(f"lora_modules names {name!r} twice; give each adapter a name of its own")
        found[name] = path
    return found


def _from_json(text: str) -> tuple[str, str]:
    try:
        values: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"lora_modules holds {text!r:.100}, which is not valid JSON: {error}") from None
    if unknown := [name for name in values if name not in _KEYS]:
        raise ValueError(f"lora_modules has no {unknown[0]!r:.60}; it has {', '.join(_KEYS)}")
    name, path = values.get("name"), values.get("path")
    return (name, path) if isinstance(name, str) and isinstance(path, str) else ("", "")
