"""Tokenizers of checkpoint folders."""

import builtins
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.config import DEMO
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.models.tokenizer import Tokenizer, load_pretrained
from tests.fakes import edit_json
from tests.specdec.tiny_checkpoints import Tiny

CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
Path({ran!r}).touch()
from transformers import PreTrainedTokenizerFast as Own, LlamaConfig as OwnConfig
"""


@pytest.mark.parametrize("load", [Tokenizer, load_pretrained], ids=["serving", "training"])
@pytest.mark.parametrize(
    ("tokenizer", "config"),
    [
        ({"auto_map": {"AutoTokenizer": [None, "own.Own"]}}, {}),
        ({"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}, {}),
        ({"auto_map": ["own.Own", None], "tokenizer_class": None}, {}),
        ({"auto_map": {"AutoTokenizer": [None, "own.Own"]}, "tokenizer_class": "Own"}, {"model_type": "own"}),
        ({}, {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoTokenizer": [None, "own.Own"]}}),
        ({}, {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}),
    ],
    ids=str,
)
def test_code_of_the_folder_never_runs(
    tiny: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tokenizer: dict[str, Any],
    config: dict[str, Any],
    load: Callable[[Path], object],
) -> None:
    """The user is never asked to allow it. The folder's tokenizer.json says all that its class would."""
    folder, ran = tmp_path / "target", tmp_path / "ran"
    shutil.copytree(tiny.target, folder)
    (folder / "own.py").write_text(CODE.format(ran=str(ran)))
    edit_json(folder / "config.json", **config)
    edit_json(folder / "tokenizer_config.json", **tokenizer)
    asked: list[str] = []
    monkeypatch.setattr(builtins, "input", lambda *words: [*map(asked.append, map(str, words)), "y"][-1])
    load(folder)
    assert not ran.exists()
    assert not asked


def test_a_tokenizer_that_cannot_be_read_is_named(tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(tiny.target, folder)
    (folder / "tokenizer.json").write_text(json.dumps({"model": 5}))
    with pytest.raises(CheckpointError, match="the tokenizer cannot be read: ") as caught:
        Tokenizer(folder)
    assert "\n" not in str(caught.value)


def test_variables_of_the_chat_template_are_passed_on(tiny: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny.target, tmp_path, dirs_exist_ok=True)
    template = "{{ messages[0].content + names[0] }}{% if add_generation_prompt %}!{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer(tmp_path)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
    assert tokenizer.encode_chat(messages, names=["b"]) == tokenizer.encode("ab!")
    assert tokenizer.encode_chat(messages, names=["b"], add_generation_prompt=False) == tokenizer.encode("ab")
    # Neither may a template raise what it likes, nor an argument change what is returned.
    assert tokenizer.encode_chat(messages, names=["b"], tokenize=True) == tokenizer.encode("ab!")
    for content, names in [(None, ["b"]), (["a"], ["b"]), ("a", None), ("a", [])]:
        with pytest.raises(ValueError, match=r"^the chat template refuses the conversation: .+$"):
            tokenizer.encode_chat([{"role": "user", "content": content}], names=names)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ 10.0 ** 400 }}",
        "{% macro show(schema) %}{{ show(schema['items']) if schema['items'] }}{% endmacro %}{{ show(tools[0]) }}",
    ],
)
def test_a_template_that_cannot_be_computed_refuses_the_conversation(tiny: Tiny, template: str) -> None:
    nested: dict[str, Any] = {}
    for _ in range(2000):
        nested = {"items": nested}
    tokenizer, arguments = Tokenizer(tiny.target), {"chat_template": template, "tools": [nested]}
    messages = tokenizer.chat_messages([{"role": "user", "content": [{"type": "text", "text": "a"}]}], **arguments)
    with pytest.raises(ValueError, match=r"^the chat template refuses the conversation: .+$") as caught:
        tokenizer.chat_text(messages, **arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("split", [True, False], ids=["special tokens split", "special tokens whole"])
def test_tokens_are_those_of_transformers(tmp_path: Path, special: bool, split: bool) -> None:
    """Whatever the number and the length of the texts: many are encoded in several calls."""
    folder = shutil.copytree(DEMO / "target", tmp_path / "target", ignore=shutil.ignore_patterns("*.safetensors"))
    edit_json(folder / "tokenizer_config.json", split_special_tokens=split)
    tokenizer = Tokenizer(folder)
    texts = ["", "a", "A table for 4,\n please. \u00e9\u4e2d", "<|user|>hi<|end|>", "to and fro " * 30_000, "b" * 300]
    wanted = tokenizer.pretrained(texts, add_special_tokens=special)["input_ids"]
    assert tokenizer.encode_batch(texts, special) == wanted
    assert [tokenizer.encode(text, special) for text in texts] == wanted
    assert (len(wanted[3]) == 3 + special) == (not split)
