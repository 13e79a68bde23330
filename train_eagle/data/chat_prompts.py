"""Prompts that ask a model to answer conversations."""

from collections.abc import Sequence

from specdec.engine.request_maker import RequestMaker
from specdec.train_eagle.data.chat_mask import BadConversation, Message
from specdec.train_eagle.data.conversations import BadData, Entry, Source, parse, read

# Stands where an answer is to come.
ANSWER = {"role": "assistant", "content": "?"}


def question(entry: Entry) -> list[Message]:
    """Return the messages to be answered: those before the first answer, or all if the last is a question.

    Raises:
        BadConversation: there is no question.
    """
    messages = _messages(entry)
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[: [message["role"] for message in messages].index("assistant")]
    if not any(message["role"] == "user" for message in messages):
        raise BadConversation("no question", "the user says nothing before the first answer")
    return messages


def with_answers(entry: Entry) -> list[Message]:
    """Return a conversation with an answer of the assistant, which is to be replaced, to the user's last turn as well.

    Raises:
        BadConversation: there is nothing to answer.
    """
    messages = _messages(entry)
    if messages and messages[-1]["role"] == "user":
        messages.append(ANSWER)
    if ANSWER["role"] not in [message["role"] for message in messages]:
        raise BadConversation("no question", "the user says nothing")
    return messages


def _messages(entry: Entry) -> list[Message]:
    """Return a conversation that may lack answers, of `messages`, `conversations`, a `prompt`, or the user's `turns`.

    Raises:
        BadConversation: there is none.
    """
    value = entry.value
    if not isinstance(value, dict):
        return entry.messages()
    # Data sets of conversations may have the first question as a `prompt` besides.
    turns: object = value.get("messages") or value.get("conversations")
    match value:
        case _ if turns:
            pass
        case {"prompt": str() as asked}:
            turns = [{"role": "user", "content": asked}]
        case {"turns": [str(), *_] as all_asked}:
            turns = [part for asked in all_asked for part in ({"role": "user", "content": asked}, ANSWER)]
    if not isinstance(turns, list):
        raise BadConversation("no question", "give messages, conversations, turns or a prompt")
    # `parse` insists on an answer, as training does.
    return parse({**value, "messages": [*turns, ANSWER]})[:-1]


def read_prompts(
    maker: RequestMaker, source: Source, limit: int | None, max_tokens: int, bad: BadData
) -> list[list[int]]:
    """Return token ids of the questions in the first `limit` entries; other entries go to `bad`.

    Raises:
        ValueError: no question is left.
    """
    prompts, problem = [], "there is nothing in it"
    for entry in read([source], limit):
        try:
            prompt = chat_prompt(maker, question(entry))
            if len(prompt) + max_tokens > maker.max_model_len:
                detail = f"{len(prompt)} tokens and {max_tokens} to come, of {maker.max_model_len}; lower max_tokens"
                raise BadConversation("too long", detail)
            prompts.append(prompt)
        except BadConversation as error:
            bad.add(error, entry.place)
            problem = f"line {entry.place.line}: {error}"
    if not prompts:
        raise ValueError(f"{source.name}: no prompt that can be answered: {problem}")
    return prompts


def chat_prompt(maker: RequestMaker, messages: Sequence[Message]) -> list[int]:
    """Return the prompt of a conversation.

    Raises:
        BadConversation: the chat template refuses it.
    """
    try:
        return maker.texts.chat_prompt(messages, {})
    except Exception as error:  # a template may raise any exception
        raise BadConversation("refused by the chat template", str(error)) from None
