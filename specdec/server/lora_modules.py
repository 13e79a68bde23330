"""`--lora-modules`. Pure Python, so that the command line reports mistakes at once."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

_KEYS = ("name", "path", "draft_lora_path", "base_model_name")


class LoRAModule(NamedTuple):
    """An adapter of `--lora-modules`; its fields are those of `LoRARequest`."""

    lora_name: str
    lora_path: str
    draft_lora_path: str | None = None


def read_lora_modules(given: Sequence[str]) -> list[LoRAModule]:
    """Return adapters.

    Args:
        given: `NAME=FOLDER` each, or vLLM's JSON object with `name`, `path` and perhaps `base_model_name`, and perhaps
            `draft_lora_path`, without which `path` may not be left out.

    Raises:
        ValueError: one of another form, or a name that is given twice.
    """
    found: dict[str, LoRAModule] = {}
    for each in given:
        module = _from_json(each) if each.lstrip().startswith("{") else LoRAModule(*each.partition("=")[::2])
        if not module.lora_name or not (module.lora_path or module.draft_lora_path):
            raise ValueError(f"lora_modules holds {each!r:.100}; it must be NAME=FOLDER, or JSON with name and path")
        if module.lora_name in found:
            raise ValueError(f"lora_modules names {module.lora_name!r} twice; give each adapter a name of its own")
        found[module.lora_name] = module
    return list(found.values())


def _from_json(text: str) -> LoRAModule:
    try:
        values: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"lora_modules holds {text!r:.100}, which is not valid JSON: {error}") from None
    if unknown := [name for name in values if name not in _KEYS]:
        raise ValueError(f"lora_modules has no {unknown[0]!r:.60}; it has {', '.join(_KEYS)}")
    name, path, draft = values.get("name"), values.get("path", ""), values.get("draft_lora_path")
    is_text = all(isinstance(value, str) for value in (name, path, draft or ""))
    return LoRAModule(str(name), path, draft) if is_text else LoRAModule("", "")
