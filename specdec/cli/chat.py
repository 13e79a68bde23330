"""`specdec chat`."""

from typing import Annotated, Any

import typer

from specdec.cli.model_options import OWNERS, SHOWN_DEFAULTS, Draft, Model, ModelOptions
from specdec.cli.options import Verbose, with_options
from specdec.config import AUTO


@with_options(*OWNERS, defaults=SHOWN_DEFAULTS)
def chat(
    model: Model = None,
    draft: Draft = AUTO,
    system: Annotated[str, typer.Option(metavar="TEXT", show_default=False, help="System message.")] = "",
    verbose: Verbose = False,  # noqa: ARG001
    **options: Any,
) -> None:
    """Chat with the model in the terminal.

    /help lists the commands. Ctrl-C ends an answer, Ctrl-D the chat. A pasted text is one message. A line that ends
    with a backslash goes on in the next; triple quotation marks begin and end several lines. Piped input gets one
    answer per line.

    \b
    Examples:
      specdec chat
      specdec chat --model path/to/llama --draft path/to/head --temperature 0.7
      specdec chat --system "Answer in one sentence." < questions.txt
    """
    given = ModelOptions.of(model, draft, options)

    # Late, because torch takes seconds to import, and --help and mistakes should not wait for it.
    from specdec.cli.chat_loop import ChatLoop
    from specdec.cli.conversation import Conversation

    llm = given.load()
    raise typer.Exit(ChatLoop(Conversation(llm, given.params(llm), system)).run())
