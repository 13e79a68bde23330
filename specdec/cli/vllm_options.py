"""Command lines of `vllm serve`: other spellings of options, and options that ask for what is done anyway."""

import json
from collections.abc import Iterable, Iterator
from typing import Any, get_type_hints

from specdec.building.vllm_keywords import FOREIGN_ENGINE, VLLMKeywords
from specdec.cli.options import Command
from specdec.kernels.types.settings import Foreign

# vLLM's short names.
_SHORT = {
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-q": "--quantization",
}
_OTHER_NAMES = {
    "--enable-log-requests": "--verbose",
    "--spec-method": "--speculative-config.method",
    "--spec-model": "--speculative-config.model",
    "--spec-tokens": "--speculative-config.num_speculative_tokens",
}
# Options that take JSON, whose keys may also be given one by one, as `--option.key VALUE`.
_WITH_KEYS = ("--speculative-config", "--kv-transfer-config")
# vLLM's options of its server; those of its engine are in `FOREIGN_ENGINE`.
_LOGS = "requests are logged with --verbose"
_FOREIGN_SERVER = {
    "enable_log_requests": Foreign(_LOGS, (False,)),
    "disable_log_requests": Foreign(_LOGS, (True,)),
    "disable_uvicorn_access_log": Foreign(_LOGS, (True,)),
    "disable_fastapi_docs": Foreign("FastAPI's pages are not there; /openapi.json is", (True,)),
    "chat_template_content_format": Foreign("it is found in the chat template", ("auto",)),
}
_FOREIGN = {**FOREIGN_ENGINE, **_FOREIGN_SERVER}
_SWITCHES = {name for name, kind in get_type_hints(VLLMKeywords).items() if kind in (bool, bool | None)} | {
    name for name, each in _FOREIGN_SERVER.items() if isinstance((each.allowed or ("",))[0], bool)
}


class ServeCommand(Command):
    """A command that also takes the options of `vllm serve`, as far as they mean the same or nothing here."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {flag for each in self.params for flag in (*each.opts, *each.secondary_opts)}
        return super().parse_args(ctx, list(_joined_keys(_own_words(args, known))))


def _own_words(args: Iterable[str], known: set[str]) -> Iterator[str]:
    """Yield a command line's words with options by their names here, and without those that ask for nothing.

    Raises:
        ValueError: an option of vLLM's that asks for something else.
    """
    words = iter(args)
    for word in words:
        name, equals, value = word.partition("=")
        first, dot, key = name.partition(".")
        flag = _SHORT.get(first, first)
        if flag.startswith("--"):
            flag = flag.replace("_", "-")
        flag = _OTHER_NAMES.get(flag, flag)
        foreign = flag[2:].removeprefix("no-").replace("-", "_") if flag.startswith("--") else ""
        if flag in known or foreign not in _FOREIGN:
            yield f"{flag}{dot}{key}{equals}{value}"
        elif foreign in _SWITCHES:
            _FOREIGN[foreign].check(flag, not flag.startswith("--no-") if not equals else _value(value))
        else:
            _FOREIGN[foreign].check(flag, _value(value if equals else next(words, "")))


def _joined_keys(words: Iterable[str]) -> Iterator[str]:
    """Yield the words, but those that give keys of an option as one JSON object behind the others.

    Raises:
        ValueError: an option given as a whole and by its keys.
    """
    objects: dict[str, dict[str, Any]] = {}
    given, left = set[str](), iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        option, dot, path = name.partition(".")
        given.add(option if not dot else "")
        if not dot or option not in _WITH_KEYS:
            yield word
            continue
        *outer, last = path.split(".")
        place = objects.setdefault(option, {})
        for key in outer:
            place = place.setdefault(key.replace("-", "_"), {})
        place[last.replace("-", "_")] = _value(value if equals else next(left, ""))
    for option, found in objects.items():
        if option in given:
            raise ValueError(f"{option} is given as a whole and by its keys; choose one")
        yield f"{option}={json.dumps(found)}"


def _value(text: str) -> Any:
    """Return a value as JSON has it, or text that is none."""
    try:
        return json.loads(text)
    except ValueError:
        return {"true": True, "false": False}.get(text.lower(), text)
