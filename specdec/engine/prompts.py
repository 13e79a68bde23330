"""The forms of a prompt: text or token ids, alone or in vLLM's dicts, and several of them. Pure Python."""

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any, NotRequired, TypedDict

from specdec.kernels.types.settings import Foreign, check_text, unknown_name


class TextPrompt(TypedDict):
    """A prompt by its text; `cache_salt` as in `LLM.generate`, for this prompt alone."""

    prompt: str
    cache_salt: NotRequired[str | None]


class TokensPrompt(TypedDict):
    """A prompt by its tokens; `prompt` is the text that `RequestOutput.prompt` shows."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str | None]
    cache_salt: NotRequired[str | None]


PlainPrompt = str | Sequence[int]
# Type checkers take a dict that is written within a list for any mapping.
Prompt = PlainPrompt | TextPrompt | TokensPrompt | Mapping[str, Any]
_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_TEXT_ALONE = Foreign("prompts are text or token ids", ({},))
FOREIGN_PROMPT = dict.fromkeys(("multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids"), _TEXT_ALONE) | {
    "prompt_embeds": Foreign("prompts are text or token ids"),
    "encoder_prompt": Foreign("models have a decoder alone"),
}


def one_each(batch: Sequence[Any], name: str, given: Any) -> list[Any]:
    """Return what each prompt of a batch gets of something that is given once for all, or once each.

    Raises:
        ValueError: another number of them.
    """
    values = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given] * len(batch)
    if len(values) != len(batch):
        raise ValueError(f"{len(values)} {name} for {len(batch)} prompts; give one, or one each")
    return values


def prompt_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list of prompts.

    Raises:
        ValueError: neither text nor a sequence.
    """
    batch: Any = as_list(prompts)
    if isinstance(batch, Mapping):
        return [batch]
    if isinstance(batch, bytes) or not isinstance(batch, Sequence):
        raise ValueError(f"prompts is {prompts!r}; it must be text or token ids, or a list of these")
    return [batch] if isinstance(batch, str) or (batch and isinstance(batch[0], Number)) else list(batch)


def read_prompt(prompt: Prompt, cache_salt: str | None) -> tuple[PlainPrompt, str | None, str | None]:
    """Return a prompt in one form: its text or token ids, what `RequestOutput.prompt` shows, and its cache salt.

    Args:
        cache_salt: of prompts that bring none.

    Raises:
        ValueError: a dict with an unknown key, without a prompt, or with what is not supported.
    """
    if not isinstance(prompt, Mapping):
        return prompt, prompt if isinstance(prompt, str) else None, cache_salt
    given: Mapping[str, Any] = prompt
    for key, value in given.items():
        if key in FOREIGN_PROMPT:
            FOREIGN_PROMPT[key].check(key, value)
        elif key not in _KEYS:
            raise unknown_name("a prompt", str(key), _KEYS)
    text, ids, salt = (given.get(key) for key in _KEYS)
    content = text if ids is None else ids
    if content is None:
        raise ValueError("a prompt has neither 'prompt' nor 'prompt_token_ids'; give one of them")
    if text is not None:
        check_text("the prompt", text, "prompt")
    return content, text, cache_salt if salt is None else salt


def as_list(value: Any) -> Any:
    """Return arrays and tensors as lists."""
    return value.tolist() if hasattr(value, "tolist") else value
