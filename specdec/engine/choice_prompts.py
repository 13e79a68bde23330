"""Choices as texts: their tokens, and those of the prompt that they continue. Pure Python."""

from collections.abc import Sequence
from dataclasses import replace

from specdec.core.sampling_params import SamplingParams
from specdec.engine.prompts import PlainPrompt, as_list
from specdec.models.tokenizer import Tokenizer

# Tokens of a prompt whose text a choice is tokenized behind.
_CONTEXT = 16


def with_choice_tokens(
    prompt: PlainPrompt, params: SamplingParams, tokenizer: Tokenizer | None, add_special_tokens: bool = True
) -> tuple[PlainPrompt, SamplingParams]:
    """Return a prompt and its parameters with choices as token ids.

    A text prompt is tokenized together with each of its choices, so that the tokens are those of the whole text; a
    token at the seam may hold a part of both. The prompt's tokens are those that all these texts begin with. A prompt
    of token ids stays as it is; see `_tokens_after`.

    Args:
        add_special_tokens: whether a text prompt lacks the special tokens that the tokenizer adds to a text.

    Raises:
        ValueError: choices are texts, and there is no tokenizer.
    """
    choices = [choice for choice in params.choices or () if isinstance(choice, str)]
    if not choices:
        return prompt, params
    if tokenizer is None:
        raise ValueError("choices are texts, and the model's folder has no tokenizer; give token ids")
    if not isinstance(prompt, str):
        return prompt, replace(params, choices=_tokens_after(prompt, choices, tokenizer))
    alone, *texts = tokenizer.encode_batch([prompt, *(prompt + choice for choice in choices)], add_special_tokens)
    # At least one token of each text is the choice's, also where its text is one that a tokenizer drops.
    end = min(common_length([alone, *texts]), min(map(len, texts)) - 1)
    return texts[0][:end], replace(params, choices=[text[end:] for text in texts])


def _tokens_after(prompt: Sequence[int], choices: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the tokens of choices that continue a prompt of token ids.

    A choice is tokenized behind the text of the prompt's last tokens, since tokenizers write the beginning of a text
    differently: those of SentencePiece's kind put a space before it, and some another one behind a special token.
    Where its tokens there are not its text, or one would hold a part of both, it is tokenized behind the end of a
    line, and where that is not possible either, by itself.
    """
    ids = as_list(prompt)
    tail = ids[-_CONTEXT:] if isinstance(ids, list | tuple) else []
    # Others are refused later.
    known = [token for token in tail if type(token) is int and 0 <= token < tokenizer.backend.get_vocab_size()]
    context = _text(tokenizer, known)
    found = tokenizer.encode_batch(choices, False)
    is_whole = [False for _ in choices]
    for before in (context, "\n"):
        alone, *texts = tokenizer.encode_batch([before, *(before + choice for choice in choices)], False)
        for place, (text, choice) in enumerate(zip(texts, choices, strict=True)):
            own = text[len(alone) :]
            continues = text[: len(alone)] == alone and bool(own)
            if not is_whole[place] and continues and _text(tokenizer, [*known, *own]) == context + choice:
                found[place], is_whole[place] = own, True
    return found


def _text(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return tokenizer.backend.decode(tokens, skip_special_tokens=False)


def common_length(sequences: Sequence[list[int]]) -> int:
    """Return how many first tokens all sequences share."""
    # All sequences lie between the first and the last in order.
    first, last = min(sequences), max(sequences)
    pairs = zip(first, last, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(last)))
