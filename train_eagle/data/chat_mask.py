"""A conversation as tokens, with a mask of what the assistant said."""

import copy
import hashlib
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from rich.console import Console
from rich.text import Text
from tokenizers import processors
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from specdec.core.reasoning import ReasoningParser
from specdec.text.text_stream import TextStream

Message = dict[str, str]
Span = tuple[int, int]

# Stands for an answer in a rendering, to see what the template writes behind it; templates have no such character.
_ANSWER = "\ue000"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class Sample(NamedTuple):
    """A tokenised conversation, or its beginning up to an answer.

    Attributes:
        token_ids: the conversation through the chat template.
        mask: per token, whether the assistant said it (True or 1), end token included. `mask[i]` is about token i
            itself: a loss that compares the prediction of row i with token i + 1 uses `mask[i + 1]`.
        continues: whether it is of the same conversation as the sample before it, up to another answer.
    """

    token_ids: Sequence[int]
    mask: Sequence[int]
    continues: bool = False


class BadConversation(ValueError):
    """A conversation that cannot be trained on; the message is one line.

    Attributes:
        reason: the problem in a few words, the same for all conversations that have it.
        detail: what is particular to this one.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(" ".join((f"{reason}: {detail}" if detail else reason).split()))
        self.reason, self.detail = reason, detail


class ChatMask:
    """Masks of the assistant's tokens in conversations that a tokenizer's chat template renders.

    The assistant's text is what the template marks with `{% generation %}`. In a template without marks it is what an
    assistant's turn adds to the rendering of the turns before it with `add_generation_prompt`. White space after the
    token that ends a turn is left out: the template writes it, the model never does. A turn that ends without a
    special token keeps its white space, since the two cannot be told apart.

    Some templates write a turn differently once others follow: those of thinking models leave out the thinking of
    earlier turns. Then each answer is a sample of its own, behind the prompt that it has when it is served.

    A text is tokenised once as a whole. A token is the assistant's if any of its characters is.

    Raises:
        ValueError: a tokenizer without a chat template, or one that cannot tell where in the text a token stands.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        name = tokenizer.name_or_path or "the tokenizer"
        if tokenizer.chat_template is None:
            raise ValueError(f"{name}: the tokenizer has no chat template; add a chat_template.jinja to the folder")
        if not tokenizer.is_fast:
            raise ValueError(f"{name}: the tokenizer gives no character offsets; add a tokenizer.json to the folder")
        self.tokenizer = tokenizer
        self._template: str = tokenizer.get_chat_template()
        self._marked = bool(_GENERATION.search(self._template))
        self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
        # The post-processor would add special tokens, which the template writes itself, and may trim offsets.
        self._backend.post_processor = processors.Sequence([])
        self._backend.no_truncation()
        self._backend.no_padding()
        added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        self._specials = tuple({*added, *tokenizer.all_special_tokens} - {""})

    @property
    def digest(self) -> str:
        """SHA-256 of tokenizer and chat template, in hex."""
        return hashlib.sha256((self._backend.to_str() + self._template).encode()).hexdigest()

    def encode(self, messages: Sequence[Message]) -> list[Sample]:
        """Return tokens and mask of a conversation of at least one message, or of each answer if no text has all.

        Raises:
            BadConversation: the template refuses it, or leaves out thinking that the model would have written.
        """
        if not self._marked:
            return [self._tokenised(text, spans) for text, spans in self._added_spans(messages)]
        text, spans = self._render(messages, track=True)
        for message in messages:
            _check_thinking(message, text)
        return [self._tokenised(text, spans)]

    def _tokenised(self, text: str, spans: Iterable[Span]) -> Sample:
        encoded = self._backend.encode(text, add_special_tokens=False)
        said = bytearray(len(text))
        for start, end in spans:
            # White space after the token that ends a turn is not the assistant's.
            turn = text[start:end].rstrip()
            length = len(turn) if turn.endswith(self._specials) else end - start
            said[start : start + length] = b"\1" * length
        return Sample(encoded.ids, [1 in said[start:end] for start, end in encoded.offsets])

    def _added_spans(self, messages: Sequence[Message]) -> list[tuple[str, list[Span]]]:
        """Return the text with the span of each assistant turn, or such a text for each of these turns."""
        text, _ = self._render(messages)
        turns = [self._answered(messages, i) for i, message in enumerate(messages) if message["role"] == "assistant"]
        if all(text.startswith(answered) for answered, _ in turns):
            return [(text, [span for _, span in turns])]
        return [(answered, [span]) for answered, span in turns]

    def _answered(self, messages: Sequence[Message], i: int) -> tuple[str, Span]:
        """Return the text up to the end of an assistant turn, and what this adds to its prompt."""
        prompt, _ = self._render(messages[:i], prompt=True)
        answered, _ = self._render(messages[: i + 1])
        if not answered.startswith(prompt):
            # The prompt begins the thinking, which the template leaves out: the rest is as the model writes it.
            begun = prompt[prompt.rfind(ReasoningParser.START) :]
            answer = _with_thinking(messages[i])
            ending, _ = self._render([*messages[:i], {"role": "assistant", "content": _ANSWER}])
            _, found, end = ending.partition(_ANSWER)
            if begun.strip() != ReasoningParser.START or ReasoningParser.END not in answer or not found:
                raise BadConversation(
                    "turns rewritten by the chat template",
                    f"message {i + 1} does not follow its prompt; have the model answer by regenerate, or mark the "
                    "assistant's text in the template with {% generation %}",
                )
            answered = prompt + answer.removeprefix(begun).removeprefix(ReasoningParser.START) + end
        _check_thinking(messages[i], answered[len(prompt) :])
        return answered, (len(prompt), len(answered))

    def _render(self, messages: Sequence[Message], prompt: bool = False, track: bool = False) -> tuple[str, list[Span]]:
        """Return the text, and with `track` the spans inside `{% generation %}`."""
        try:
            texts, spans = render_jinja_template(
                conversations=[list(messages)],
                chat_template=self._template,
                return_assistant_tokens_mask=track,
                add_generation_prompt=prompt,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:  # a template may raise any exception
            raise BadConversation("refused by the chat template", str(error) or type(error).__name__) from None
        return texts[0], spans[0] if track else []


def _with_thinking(message: Message) -> str:
    """Return an answer behind its thinking, in the form of one text."""
    content, thinking = message["content"], message.get("reasoning_content", "").strip()
    mark = ReasoningParser
    return f"{mark.START}\n{thinking}\n{mark.END}\n\n{content}" if thinking else content


def _check_thinking(message: Message, text: str) -> None:
    if message.get("reasoning_content", "").strip() not in text:
        remedy = "put it into content, in the form in which the model writes it"
        raise BadConversation("thinking left out by the chat template", f"it reads no reasoning_content; {remedy}")


def preview(console: Console, tokenizer: PreTrainedTokenizerBase, samples: Iterable[Sample]) -> None:
    """Print samples as text, with trained tokens in green on a terminal and in `[[…]]` elsewhere."""
    for sample in samples:
        said = sum(sample.mask)
        head = f"── {len(sample.token_ids):,} tokens, {said / len(sample.token_ids):.0%} trained ──\n"
        text = Text().append(head, "bold")
        stream = TextStream(tokenizer.backend_tokenizer, skip_special=False)
        for trained, run in groupby(zip(sample.token_ids, sample.mask, strict=True), itemgetter(1)):
            piece = "".join(stream.step(token) for token, _ in run)
            if console.is_terminal:
                text.append(piece, "green" if trained else "dim")
            else:
                text.append(f"[[{piece}]]" if trained else piece)
        console.print(text, soft_wrap=True)
