"""`--chat-template` and `--enable-auto-tool-choice`."""

from pathlib import Path
from typing import Any

import pytest

from specdec.models.tokenizer import Tokenizer
from specdec.server.chat_templates import read_chat_template
from tests.specdec.server.running import Served
from tests.specdec.tiny_checkpoints import Tiny

TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "a"}],
    "max_tokens": 1,
    "tools": [{"type": "function", "function": {"name": "taxi"}}],
}


def test_a_template_is_a_file_or_a_text(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    assert read_chat_template(str(file)) == read_chat_template(TEMPLATE) == TEMPLATE
    assert read_chat_template("{% generation %}{{ messages }}{% endgeneration %}")


@pytest.mark.parametrize("given", ["absent.jinja", "{% for %}", "{{ a", "."])
def test_invalid_templates_are_told(given: str) -> None:
    with pytest.raises(ValueError, match=r"^--chat-template is [^\n]+$"):
        read_chat_template(given)


def test_a_template_replaces_that_of_the_model(folders: Tiny) -> None:
    tokenizer = Tokenizer(folders.target)
    tokenizer.set_chat_template(TEMPLATE)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "a"}])) == "[a]"


def test_tools_may_be_chosen_unless_the_server_forbids_it(engine: Served, server: Served) -> None:
    response = {"input": "a", "max_output_tokens": 1, "tools": [{"type": "function", "name": "taxi"}]}
    with engine.again(enable_auto_tool_choice=False) as strict:
        for path, body in (("/v1/chat/completions", BODY), ("/v1/responses", response)):
            assert server.send("POST", path, body)[0] == 200
            status, _, reply = strict.send("POST", path, body)
            assert (status, reply["error"]["param"]) == (400, "tool_choice")
            assert strict.send("POST", path, {**body, "tool_choice": "none"})[0] == 200
