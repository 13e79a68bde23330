"""Marks of a model's thinking as tokens of its tokenizer."""

from specdec.core.reasoning import ReasoningParser
from specdec.kernels.types.settings import ParameterError
from specdec.models.tokenizer import Tokenizer
from specdec.verify.thinking_state import ThinkingMarks


def thinking_marks(parser: type[ReasoningParser], tokenizer: Tokenizer | None, vocab_size: int) -> ThinkingMarks:
    """Return the tokens of a parser's marks.

    Raises:
        ValueError: a mark that is not one token, or a model without a tokenizer.
    """
    if tokenizer is None:
        raise ParameterError(
            "reasoning_parser", "reasoning_parser needs a tokenizer, and the model's folder has none; leave it out"
        )
    tokens = []
    for mark in (parser.START, parser.END):
        token = tokenizer.backend.token_to_id(mark)
        if token is None or token >= vocab_size:
            raise ParameterError(
                "reasoning_parser",
                f"reasoning_parser: {mark!r} is not a token of the model, so it does not think in this form; choose "
                "another parser, or leave it out",
            )
        tokens.append(token)
    also_end = (tokenizer.backend.token_to_id(text) for text in parser.ALSO_END)
    start, end = tokens
    return ThinkingMarks(
        start, end, frozenset(token for token in also_end if token is not None), tokenizer.special_tokens - {start, end}
    )
