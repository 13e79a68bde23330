"""The assistant's tokens: two ways to find them, and the definition that both must match."""

import io
import re
from collections.abc import Callable
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from specdec.train_eagle.data.chat_mask import BadConversation, ChatMask, Message, Sample, preview
from tests.specdec.metaspace_llama import TOKENIZER, ids

CHATML = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# The end token belongs to the assistant, and stands behind a space.
WORDY = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + ' <end> ' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + ' <end> ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)
END = "<|im_end|>"
CORPUS = ["the cat sat on the mat.\n\nthe dog\n  sat, too  \n\n", "é你 é你 aa aa aaa\n\n\n a\n\na"] * 20


def unmarked(template: str) -> str:
    """The same template as most models come with."""
    return re.sub(r"\{% (end)?generation %\}", "", template)


def fast(tokenizer: Tokenizer, template: str | None, **specials: str) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **specials)
    made.chat_template = template
    return made


def byte_level(template: str, trim_offsets: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE, learnt so that white space merges over turn boundaries, as published tokenizers do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "<|im_start|>", END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return fast(tokenizer, template, bos_token="<s>", eos_token=END, additional_special_tokens=["<|im_start|>"])


def word_level(template: str | None) -> PreTrainedTokenizerFast:
    names = ["<end>", "<user>", "<assistant>", "<system>", "<unk>", *"abcdefgh"]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return fast(tokenizer, template, eos_token="<end>")


def characters(template: str, *merges: tuple[str, str], trim_offsets: bool = False) -> PreTrainedTokenizerFast:
    """A token a character, other than what `merges` say, `<s>` and the end token `<e>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    tokenizer.decoder = decoders.ByteLevel()
    return fast(tokenizer, template, bos_token="<s>", eos_token="<e>")


BYTE_LEVEL = {
    (marked, trim): byte_level(CHATML if marked else unmarked(CHATML), trim)
    for marked in (True, False)
    for trim in (True, False)
}
WORD_LEVEL = {marked: word_level(WORDY if marked else unmarked(WORDY)) for marked in (True, False)}


def chats(content: st.SearchStrategy[str]) -> st.SearchStrategy[list[Message]]:
    message = st.builds(
        lambda role, text: {"role": role, "content": text}, st.sampled_from(["system", "user", "assistant"]), content
    )
    return st.lists(message, min_size=1, max_size=6)


TEXT = st.text("a t\n.,é你", min_size=1, max_size=12)
WORDS = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=5).map(" ".join)


def turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def answers(chat: list[Message]) -> list[str]:
    return [message["content"] for message in chat if message["role"] == "assistant"]


def runs(sample: Sample) -> list[list[int]]:
    """Tokens of each stretch that the assistant said."""
    pairs = zip(sample.mask, sample.token_ids, strict=True)
    return [[token for _, token in part] for said, part in groupby(pairs, key=lambda pair: pair[0]) if said]


def said(tokenizer: PreTrainedTokenizerFast, sample: Sample) -> list[str]:
    return [tokenizer.decode([token]) for token, m in zip(sample.token_ids, sample.mask, strict=True) if m]


@given(chats(TEXT))
def test_masked_text_is_what_the_assistant_says(chat: list[Message]) -> None:
    """Its words and end token are, and otherwise only white space of the prompt in one token with its first word."""
    for tokenizer in BYTE_LEVEL.values():
        (sample,) = ChatMask(tokenizer).encode(chat)
        found = [tokenizer.decode(run) for run in runs(sample)]
        for text, answer in zip(found, answers(chat), strict=True):
            assert text == answer + END or (answer[0].isspace() and text == "\n" + answer + END)


@given(chats(TEXT))
def test_prefix_difference_is_what_the_template_marks(chat: list[Message]) -> None:
    """It holds with and without trimmed offsets, and agrees with transformers' map from marked characters to tokens."""
    encoded = BYTE_LEVEL[True, False].apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    want = Sample(encoded["input_ids"], [bool(bit) for bit in encoded["assistant_masks"]])
    for tokenizer in BYTE_LEVEL.values():
        assert ChatMask(tokenizer).encode(chat) == [want]


@given(chats(WORDS))
def test_words_without_the_spaces_between_them(chat: list[Message]) -> None:
    """A tokenizer that drops white space."""
    for tokenizer in WORD_LEVEL.values():
        (sample,) = ChatMask(tokenizer).encode(chat)
        assert sample.token_ids == tokenizer.apply_chat_template(chat)["input_ids"]
        assert said(tokenizer, sample) == [word for answer in answers(chat) for word in (*answer.split(), "<end>")]


@pytest.mark.parametrize("marked", [True, False])
def test_the_assistants_first_token_is_trained(marked: bool) -> None:
    """The row that predicts it is the last of the prompt. Tokens shifted against an unshifted mask would lose it."""
    tokenizer = WORD_LEVEL[marked]
    (sample,) = ChatMask(tokenizer).encode([turn("user", "a b"), turn("assistant", "c d")])
    words = tokenizer.convert_ids_to_tokens(sample.token_ids)
    assert words == ["<user>", "a", "b", "<end>", "<assistant>", "c", "d", "<end>"]
    trained = [word for word, m in zip(words[1:], sample.mask[1:], strict=True) if m]
    assert trained == ["c", "d", "<end>"]
    assert [word for word, m in zip(words[1:], sample.mask[:-1], strict=True) if m] == ["d", "<end>"]


@pytest.mark.parametrize(
    "template",
    [
        unmarked(CHATML),
        CHATML,
        CHATML.replace("<|im_end|>' }}{% endgeneration %}", "<|im_end|>\\n' }}{% endgeneration %}"),
    ],
    ids=["difference", "marked", "newline marked too"],
)
def test_white_space_behind_the_end_token_is_the_templates(template: str) -> None:
    tokenizer = byte_level(template)
    (sample,) = ChatMask(tokenizer).encode([turn("assistant", "the cat"), turn("user", "a"), turn("assistant", "too")])
    assert [tokenizer.decode(run) for run in runs(sample)] == ["the cat" + END, "too" + END]
    assert "\n" in tokenizer.decode(sample.token_ids[-2:])


SIMPLE = (
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)


def test_a_token_that_straddles_into_the_answer_is_the_assistants() -> None:
    tokenizer = characters(SIMPLE, (":", "y"))
    (sample,) = ChatMask(tokenizer).encode([turn("user", "x"), turn("assistant", "yes")])
    assert tokenizer.convert_ids_to_tokens(sample.token_ids) == ["u", ":", "x", "<e>", "a", ":y", "e", "s", "<e>"]
    assert said(tokenizer, sample) == [":y", "e", "s", "<e>"]


def test_a_token_that_runs_over_the_end_of_the_answer_is_the_assistants() -> None:
    template = "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{{ '!?' }}{% endfor %}"
    tokenizer = characters(template, ("s", "!"))
    (sample,) = ChatMask(tokenizer).encode([turn("assistant", "yes")])
    assert said(tokenizer, sample) == ["y", "e", "s!"]


@pytest.mark.parametrize("trim_offsets", [True, False])
def test_a_space_of_the_prompt_is_not_the_assistants(trim_offsets: bool) -> None:
    """Trimmed, its offsets are empty and stand where the answer begins."""
    tokenizer = characters(SIMPLE.replace("':'", "': '").replace("'a:'", "'a: '"), trim_offsets=trim_offsets)
    (sample,) = ChatMask(tokenizer).encode([turn("user", "x"), turn("assistant", " y ")])
    assert said(tokenizer, sample) == [" ", "y", " ", "<e>"]


def test_a_turn_without_an_end_token_keeps_its_white_space() -> None:
    tokenizer = characters(SIMPLE.replace("eos_token", "'\\n'"))
    (sample,) = ChatMask(tokenizer).encode([turn("user", "x"), turn("assistant", "y"), turn("user", "z")])
    assert said(tokenizer, sample) == ["y", "\n"]


def test_every_byte_of_a_character_is_masked() -> None:
    tokenizer = characters(SIMPLE)
    (sample,) = ChatMask(tokenizer).encode([turn("user", "é"), turn("assistant", "你")])
    assert sum(sample.mask) == 3 + 1


LLAMA_2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA_3 = (
    "{% for message in messages %}{% set content = '<h>' + message['role'] + '</h>\n\n' + message['content'] | trim"
    " + eos_token %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<h>assistant</h>\n\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
    "{{ '<|user|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'assistant' %}\n"
    "{{ '<|assistant|>\n' + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "want"),
    [(LLAMA_2, [" yes <e>", " no <e>"]), (LLAMA_3, ["yes<e>", "no<e>"]), (ZEPHYR, [" yes<e>", "no\n<e>"])],
    ids=["Llama 2", "Llama 3", "Zephyr"],
)
def test_templates_in_the_manner_of_published_models(template: str, want: list[str]) -> None:
    tokenizer = characters(template)
    (sample,) = ChatMask(tokenizer).encode(
        [turn("user", "x"), turn("assistant", " yes"), turn("user", "x"), turn("assistant", "no\n")]
    )
    assert [tokenizer.decode(run) for run in runs(sample)] == want


# What reasoning models do to answers of old.
FORGETFUL = SIMPLE.replace("m['content']", "(m['content'] if loop.last else m['content'].split('|')[-1])")


def refused(template: str, chat: list[Message]) -> BadConversation:
    with pytest.raises(BadConversation) as caught:
        ChatMask(characters(template)).encode(chat)
    assert "\n" not in str(caught.value)
    return caught.value


def test_answers_that_the_template_rewrites_later_are_samples_of_their_own() -> None:
    """Each behind what it follows when it is served."""
    tokenizer = characters(FORGETFUL)
    chat = [turn("user", "x"), turn("assistant", "why|y")]
    (single,) = ChatMask(tokenizer).encode(chat)
    first, second = ChatMask(tokenizer).encode([*chat, turn("user", "z"), turn("assistant", "w")])
    assert first == single
    assert [tokenizer.decode(run) for run in runs(first)] == ["why|y<e>"]
    assert tokenizer.decode(second.token_ids) == "u:x<e>a:y<e>u:z<e>a:w<e>"
    assert [tokenizer.decode(run) for run in runs(second)] == ["w<e>"]


# Qwen3 leaves out the thinking before the last question; DeepSeek-R1 all of it, and its prompt begins the thinking.
SPLIT = "{% set parts = m['content'].split('</think>') %}"
QWEN_3 = (
    "{% for m in messages %}{{ m['role'][0] + ':' }}"
    + SPLIT
    + "{% set thinking = m['reasoning_content'] or parts[0].split('<think>\n')[-1] %}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n' + thinking.strip() + '\n</think>\n\n' }}{% endif %}"
    "{{ parts[-1].strip() + eos_token + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)
DEEPSEEK_R1 = (
    "{% for m in messages %}"
    + SPLIT
    + "{{ m['role'][0] + ':' + parts[-1] + (eos_token if m['role'] == 'assistant' else '') }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:<think>\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "prompts", "begun"),
    [
        (QWEN_3, ("u:x<e>\na:", "u:x<e>\na:y<e>\nu:z<e>\na:"), "<think>\n"),
        (DEEPSEEK_R1, ("u:xa:<think>\n", "u:xa:{}y<e>u:za:<think>\n"), ""),
    ],
    ids=["Qwen3", "DeepSeek-R1"],
)
@pytest.mark.parametrize("form", ["whole", "behind its prompt", "reasoning_content"])
def test_thinking_is_trained_as_the_model_writes_it(
    template: str, prompts: tuple[str, str], begun: str, form: str
) -> None:
    def answer(thinking: str, text: str) -> Message:
        if form == "reasoning_content":
            return {**turn("assistant", text), form: thinking}
        opening = "<think>\n" if form == "whole" else ""
        return turn("assistant", f"{opening}{thinking}\n</think>\n\n{text}")

    tokenizer = characters(template)
    chat = [turn("user", "x"), answer("why", "y"), turn("user", "z"), answer("how", "w")]
    found = [*ChatMask(tokenizer).encode(chat[:2]), *ChatMask(tokenizer).encode(chat)]
    written = [f"{begun}{thinking}<e>" for thinking in ("why\n</think>\n\ny", "how\n</think>\n\nw")]
    assert [[tokenizer.decode(run) for run in runs(sample)] for sample in found] == [[written[i]] for i in (0, 0, 1)]
    # DeepSeek's template keeps the empty lines behind the thinking.
    asked = [prompt.format("" if form == "reasoning_content" else "\n\n") for prompt in prompts]
    texts = [tokenizer.decode(sample.token_ids).removesuffix("<e>\n").removesuffix("<e>") + "<e>" for sample in found]
    assert texts == [asked[i] + written[i] for i in (0, 0, 1)]


def test_an_answer_without_the_thinking_that_its_prompt_begins_is_refused() -> None:
    error = refused(DEEPSEEK_R1, [turn("user", "x"), turn("assistant", "y")])
    assert error.reason == "turns rewritten by the chat template"
    assert "message 2 does not follow its prompt; have the model answer by regenerate" in str(error)


def test_a_template_whose_prompt_is_no_beginning_of_the_turn_is_refused() -> None:
    error = refused(SIMPLE.replace("'a:'", "'a:<think>'"), [turn("user", "x"), turn("assistant", "y")])
    assert error.reason == "turns rewritten by the chat template"
    assert "message 2 does not follow its prompt" in str(error)


@pytest.mark.parametrize(
    ("template", "message"),
    [("{{ raise_exception('roles\nmust alternate') }}", "roles must alternate"), ("{{ 1 + 'x' }}", "unsupported")],
)
def test_errors_of_a_template_are_the_conversations_fault(template: str, message: str) -> None:
    error = refused(template, [turn("user", "x"), turn("assistant", "y")])
    assert error.reason == "refused by the chat template"
    assert message in str(error)


def test_tokenizers_that_cannot_do_it_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no chat template; add a chat_template\.jinja"):
        ChatMask(word_level(None))
    slow = word_level(WORDY)
    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", False)
    with pytest.raises(ValueError, match=r"no character offsets; add a tokenizer\.json"):
        ChatMask(slow)


def test_digest_tells_tokenizers_and_templates_apart() -> None:
    made: list[Callable[[], PreTrainedTokenizerFast]] = [
        lambda: characters(SIMPLE),
        lambda: characters(SIMPLE, ("a", "b")),
        lambda: characters(FORGETFUL),
    ]
    digests = [ChatMask(make()).digest for make in made]
    assert len(set(digests)) == 3
    assert digests == [ChatMask(make()).digest for make in made]


def test_preview_marks_what_is_trained() -> None:
    tokenizer = characters(SIMPLE)
    (sample,) = ChatMask(tokenizer).encode([turn("user", "x[b]"), turn("assistant", "y"), turn("user", "z")])
    plain, terminal = io.StringIO(), io.StringIO()
    preview(Console(file=plain), tokenizer, [sample])
    assert plain.getvalue() == "── 15 tokens, 13% trained ──\nu:x[b]<e>a:[[y<e>]]u:z<e>\n"
    preview(Console(file=terminal, force_terminal=True, color_system="standard"), tokenizer, [sample])
    assert "\x1b[2mu:x[b]<e>a:\x1b[0m\x1b[32my<e>\x1b[0m\x1b[2mu:z<e>\x1b[0m" in terminal.getvalue()


def test_preview_keeps_the_space_where_training_begins() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER)
    file = io.StringIO()
    preview(Console(file=file), tokenizer, [Sample(ids("▁hello", "▁world", "</s>"), [False, True, True])])
    assert "hello[[ world</s>]]" in file.getvalue()
