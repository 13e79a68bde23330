"""`--chat-template`."""

from pathlib import Path

from jinja2 import TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Characters that hardly a file name has, but every template.
_OF_TEMPLATES = "{}\n"
# A tag of transformers' own, which marks answers for training.
_OWN_TAG = "unknown tag 'generation'"


def read_chat_template(given: str) -> str:
    """Return the template of a setting: that of a file, or the text itself, as in vLLM.

    Raises:
        ValueError: neither a file nor a template.
    """
    try:
        text = Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if not any(char in given for char in _OF_TEMPLATES):
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            message = f"--chat-template is {given!r}: {reason}; give a file or the text of a Jinja template"
            raise ValueError(message) from None
        text = given
    try:
        ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except TemplateSyntaxError as error:
        if _OWN_TAG not in str(error):
            message = f"--chat-template is no Jinja template: line {error.lineno}: {error.message}; mend it"
            raise ValueError(message) from None
    return text
