"""Commands of `specdec chat`: lines that begin with a slash."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from specdec.cli.conversation import Conversation
from specdec.cli.render import summary
from specdec.cli.screen import DIM, OWN, Screen, draw_tree, token_text
from specdec.cli.timed_batch import TimedBatch

# The function of a command. It takes the text behind the command's name, and returns what `run_command` returns.
Work = Callable[[Conversation, Screen, str], str]


class ChatCommand(NamedTuple):
    """A command.

    Attributes:
        argument: what may follow its name; empty for nothing.
    """

    argument: str
    help: str
    work: Work


def run_command(line: str, conversation: Conversation, screen: Screen) -> str:
    """Run a command; return a line about its effect, or an empty string if it has printed its output.

    Raises:
        EOFError: the command ends the chat.
        ValueError: an unknown command, or a wrong argument.
    """
    name, _, argument = line.strip().partition(" ")
    if name not in COMMANDS:
        raise ValueError(f"unknown command {name}; /help lists them, and a space before the slash makes it a message")
    if argument and not COMMANDS[name].argument:
        raise ValueError(f"{name} takes nothing behind it, and got {argument!r}")
    return COMMANDS[name].work(conversation, screen, argument.strip())


def _stats(conversation: Conversation, screen: Screen, _: str) -> str:
    llm, answers = conversation.llm, conversation.answers
    total, tree = llm.stats(), llm.config.tree_in_words
    seed, drafts = conversation.params.seed, conversation.params.speculation.enabled
    lines = {
        "last answer": summary(TimedBatch(answers[-1:], answers[-1].seconds, tree=tree)) if answers else "none yet",
        "all answers": summary(TimedBatch(answers, sum(answer.seconds for answer in answers), tree=tree)),
        "conversation": f"{conversation.num_tokens} of {llm.max_model_len} tokens",
        "prefix cache": f"{total.prefix_hits} of {total.prefix_queries} prompt tokens",
        "draft": f"{llm.config.sources or 'none'}{'' if drafts else ', off'}",
        "seed": "drawn anew for each answer" if seed is None else str(seed),
    }
    screen.write(*((f"{name:<14}{text}\n", OWN) for name, text in lines.items()))
    return ""


def _tree(conversation: Conversation, screen: Screen, _: str) -> str:
    trace = conversation.answers[-1].output.trace if conversation.answers else []
    drafted = [number for number, step in enumerate(trace) if step.tokens]
    tokenizer = conversation.llm.tokenizer
    if not drafted or tokenizer is None:
        raise ValueError(
            "the last answer has no draft tree; steps draft nothing without a draft (--draft, /draft on), or where "
            "plain steps are faster (unless --fixed-drafts)"
        )
    step = trace[drafted[-1]]
    found = f"step {drafted[-1]} of {len(trace) - 1}: {len(step.path)} of {len(step.tokens)} draft tokens accepted\n"
    screen.write((found, DIM))
    ascii_only = screen.console.options.ascii_only
    screen.draw(draw_tree(step, partial(token_text, tokenizer, ascii_only=ascii_only), ascii_only=ascii_only))
    return ""


def _seed(conversation: Conversation, _: Screen, argument: str) -> str:
    if argument and not argument.isdecimal():
        raise ValueError(f"/seed is {argument!r}; it must be a whole number from 0, or nothing for a new one each time")
    seed = int(argument) if argument else None
    conversation.params = replace(conversation.params, seed=seed)
    return "a new seed for each answer" if seed is None else f"seed {seed}"


def _draft(conversation: Conversation, _: Screen, argument: str) -> str:
    if argument not in ("on", "off"):
        raise ValueError(f"/draft is {argument!r}; it must be on or off")
    if conversation.llm.config.sources is None:
        raise ValueError("this chat has no draft; start it with --draft")
    params = conversation.params
    conversation.params = replace(params, speculation=replace(params.speculation, enabled=argument == "on"))
    return f"drafts {argument}"


def _system(conversation: Conversation, _: Screen, argument: str) -> str:
    conversation.system = argument
    return "system message set" if argument else "no system message"


def _reset(conversation: Conversation, _: Screen, __: str) -> str:
    conversation.reset()
    return "new conversation"


def _help(_: Conversation, screen: Screen, __: str) -> str:
    usages = {f"{name} {command.argument}": command.help for name, command in COMMANDS.items()}
    screen.write(*((f"{usage:<16}{text}\n", OWN) for usage, text in usages.items()))
    return ""


def _exit(_: Conversation, __: Screen, ___: str) -> str:
    raise EOFError


COMMANDS = {
    "/stats": ChatCommand("", "Show speed, accepted drafts, and how full the context is.", _stats),
    "/draft": ChatCommand(
        "on|off", "Answer with drafts or without; by the default acceptance rule the text is the same.", _draft
    ),
    "/tree": ChatCommand("", "Draw the draft tree of the last step that had one.", _tree),
    "/seed": ChatCommand("[N]", "Sample the next answers with this seed; without N, with a new one each.", _seed),
    "/system": ChatCommand("[TEXT]", "Set the system message; without TEXT, remove it.", _system),
    "/reset": ChatCommand("", "Start a new conversation; keep the system message and other settings.", _reset),
    "/help": ChatCommand("", "List the commands.", _help),
    "/exit": ChatCommand("", "End the chat, as Ctrl-D does.", _exit),
}
