"""Conversations of every form, and everything that can be wrong with them."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.train_eagle.data.chat_mask import BadConversation, Message
from specdec.train_eagle.data.conversations import (
    BadData,
    DatasetSource,
    Entry,
    FileSource,
    Place,
    open_source,
    parse,
    read,
)

CHAT = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
GOOD = {"messages": CHAT}
GIVEN = json.dumps(GOOD)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.sampled_from(["user", "gpt", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["messages", "conversations", "role", "from", "content", "value"]), inner, max_size=3
        )
    ),
    max_leaves=12,
)


def outcome(entry: Entry) -> list[Message] | str:
    """The conversation or the reason that there is none."""
    try:
        return entry.messages()
    except BadConversation as error:
        return "several lines" if "\n" in str(error) else error.reason


def outcomes(file: Path) -> list[tuple[int, list[Message] | str]]:
    return [(entry.place.line, outcome(entry)) for entry in FileSource(file)]


@pytest.mark.parametrize("user", ["human", "user"])
@pytest.mark.parametrize("assistant", ["gpt", "assistant"])
def test_sharegpt_is_read_as_messages(user: str, assistant: str) -> None:
    turns = [("system", "s"), (user, "x"), (assistant, "y")]
    chat = parse({"id": 7, "conversations": [{"from": name, "value": text} for name, text in turns]})
    assert chat == [{"role": "system", "content": "s"}, *CHAT]


def test_keys_that_a_row_of_a_data_set_lacks_are_none() -> None:
    turns = [{"role": None, "content": None, "from": m["role"], "value": m["content"]} for m in CHAT]
    assert parse({"messages": None, "conversations": turns}) == CHAT


def test_thinking_is_kept_by_the_names_that_templates_read() -> None:
    """And what a data set has in a row without thinking or tools is none."""
    for name in ("reasoning_content", "reasoning"):
        thinking = [CHAT[0], {**CHAT[1], name: "who"}]
        assert parse({"messages": thinking})[1] == {**CHAT[1], "reasoning_content": "who", "reasoning": "who"}
    for nothing in (None, "", "\n"):
        assert parse({"messages": [CHAT[0], {**CHAT[1], "reasoning_content": nothing, "tool_calls": None}]}) == CHAT
    for nothing in (None, [], "[]"):
        assert parse({**GOOD, "tools": nothing}) == CHAT


def talk(*contents: Any, role: Any = "assistant") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for content in contents]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([GOOD], "not a JSON object: "),
        ("hello\n" * 100, "not a JSON object: "),
        ({"text": "x"}, "no conversation: "),
        ({"messages": "x"}, "no conversation: "),
        ({"messages": []}, "empty conversation: "),
        ({"messages": [[]]}, "turn is no object: []; "),
        (talk("x", role="tool"), "unknown role: 'tool'; use system, user"),
        (talk("x", role=["user"]), "unknown role: ['user']; "),
        (talk("x", role=None), "unknown role: None; "),
        (talk("x", role="user"), "no assistant turn: "),
        (talk("x", None), "content is no string: None of the assistant; "),
        (talk("x", [{"type": "text", "text": "x"}]), "content is no string: [{"),
        ({"messages": [{**CHAT[1], "reasoning_content": ["x"]}]}, "reasoning_content is no string: ['x'] of the a"),
        ({"messages": [{**CHAT[1], "reasoning": "\ud800"}]}, "reasoning_content is no UTF-8 text: surrogates not"),
        ({"messages": [{**CHAT[1], "tool_calls": [{"id": "1"}]}]}, "tool calls: "),
        ({**GOOD, "tools": [{"type": "function"}]}, "tools: "),
        ({**GOOD, "tools": '[{"name": "f"}]'}, "tools: "),
        (talk("x", ""), "empty content: the assistant says nothing"),
        (talk("x", " \n"), "empty content: "),
        (talk("x", "a\udcff"), "content is no UTF-8 text: surrogates not allowed at character 2"),
    ],
)
def test_bad_conversations_are_told_apart(value: object, message: str) -> None:
    with pytest.raises(BadConversation) as caught:
        parse(value)
    assert str(caught.value).startswith(message)
    assert caught.value.reason == message.partition(":")[0]
    assert len(str(caught.value)) < 200


@given(JSON)
def test_any_value_is_a_conversation_or_bad(value: object) -> None:
    try:
        chat = parse(value)
    except BadConversation:
        return
    assert {"assistant"} <= {message["role"] for message in chat} <= {"system", "user", "assistant"}
    assert all(message["content"].encode().strip() for message in chat)


def test_lines_are_counted_as_an_editor_does(tmp_path: Path) -> None:
    """The file has a byte-order mark, Windows line ends, blank lines, and line ends of Python or old Macs alone."""
    file = tmp_path / "a.jsonl"
    odd = GIVEN.replace(", ", ",\r")
    other = json.dumps(talk("x\u2028y\x85"), ensure_ascii=False)
    file.write_text(f"\ufeff{GIVEN}\r\n\r\n{other}\n{{\n[1]\n\n{odd}", encoding="utf-8", newline="")
    assert outcomes(file) == [
        (1, CHAT),
        (3, [{"role": "assistant", "content": "x\u2028y\x85"}]),
        (4, "malformed JSON"),
        (5, "not a JSON object"),
        (7, CHAT),
    ]


def test_arrays_are_read_with_the_lines_of_their_elements(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("\n" + json.dumps([GOOD, {"messages": []}, GOOD, 3], indent=2))
    text = file.read_text().split("\n")
    found = outcomes(file)
    assert [result for _, result in found] == [CHAT, "empty conversation", CHAT, "not a JSON object"]
    assert [text[line - 1].strip().rstrip(",") for line, _ in found] == ["{", "{", "{", "3"]
    for whole in ("[]", "[ \n ]", "", "\n"):
        file.write_text(whole)
        assert outcomes(file) == []


@pytest.mark.parametrize("end", [',\n{"messages"', ",\n", ",\n}]"])
def test_an_array_that_breaks_off_is_read_until_there(tmp_path: Path, end: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(f"[{GIVEN},\n{GIVEN}{end}")
    assert [result for _, result in outcomes(file)] == [CHAT, CHAT, "malformed JSON"]
    assert outcomes(file)[2][0] == 3


def test_a_list_is_a_bad_line_of_a_jsonl_file(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f"[{GIVEN}]\n{GIVEN}\n")
    assert outcomes(file) == [(1, "not a JSON object"), (2, CHAT)]


def test_a_json_file_may_hold_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(f"{GIVEN}\n{GIVEN}\n")
    assert outcomes(file) == [(1, CHAT), (2, CHAT)]


def test_compressed_files_are_read(tmp_path: Path) -> None:
    """As the lines inside; their bytes were malformed JSON."""
    plain, packed, torn = (tmp_path / name for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.gz"))
    plain.write_text('[1]\n\n{"messages": ' + json.dumps(CHAT) + "}\n")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert outcomes(packed) == outcomes(plain)
    for content in (packed.read_bytes()[:-12], plain.read_bytes()):
        torn.write_bytes(content)
        with pytest.raises(ValueError, match=r"c.jsonl.gz: cannot be decompressed: .*; download it again"):
            outcomes(torn)


def test_the_folder_of_a_parquet_file_is_a_data_set(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list([{"messages": CHAT}])
    rows.to_parquet(tmp_path / "set" / "train.parquet")
    with pytest.raises(ValueError, match=r"train.parquet: Parquet is read as a data set; give the folder .*set$"):
        open_source(tmp_path / "set" / "train.parquet")
    assert [outcome(entry) for entry in open_source(tmp_path / "set")] == [CHAT]


def test_a_byte_that_is_no_text_spoils_one_line(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    lines = [
        GIVEN.encode(),
        json.dumps(talk("é")).encode("ascii"),
        json.dumps(talk("_")).replace("_", "é").encode("latin-1"),
    ]
    file.write_bytes(b"\n".join([*lines, GIVEN.encode()]))
    assert [result for _, result in outcomes(file)] == [
        CHAT,
        [{"role": "assistant", "content": "é"}],
        "content is no UTF-8 text",
        CHAT,
    ]


def test_unreadable_lines_are_malformed(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.json"):
        file = tmp_path / name
        for monster in ("[" * 200_000, "9" * 5_000):
            file.write_text(f"{monster}\n{GIVEN}" if name == "a.jsonl" else f"[{monster}]")
            assert outcomes(file)[0] == (1, "malformed JSON")


@given(st.lists(st.sampled_from([GIVEN.encode(), b"[", b"]", b",", b"\n", b"{", b"\xff", b'"', b" ", b"\xef\xbb\xbf"])))
def test_any_file_is_read_to_its_end(tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]) -> None:
    for name in ("a.jsonl", "a.json"):
        file = tmp_path_factory.getbasetemp() / name
        file.write_bytes(b"".join(parts))
        lines = [line for line, _ in outcomes(file)]
        assert lines == sorted(lines)
        assert not lines or lines[-1] <= b"".join(parts).count(b"\n") + 1


def test_limit_is_of_each_source(tmp_path: Path) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file in files:
        file.write_text(f"\n{GIVEN}\n{{\n{GIVEN}\n")
    places = [entry.place for entry in read(map(FileSource, files), 2)]
    assert places == [Place(str(file), line) for file in files for line in (2, 3)]


def test_bad_data_is_counted_with_its_first_places() -> None:
    bad = BadData()
    assert bad.table() == ""
    for line in range(1, 6):
        bad.add(BadConversation("unknown role", "'tool'"), Place("dir/a.jsonl", line))
    bad.add(BadConversation("empty conversation"), Place("b.jsonl", 1))
    assert bad.counts == {"unknown role": 5, "empty conversation": 1}
    assert bad.table().split("\n") == [
        "bad data            how many  first at",
        "unknown role               5  dir/a.jsonl:1, dir/a.jsonl:2, dir/a.jsonl:3",
        "empty conversation         1  b.jsonl:1",
    ]


def test_strict_refuses_the_first() -> None:
    with pytest.raises(ValueError, match=r"^dir/a\.jsonl, line 3: unknown role: 'tool'; use user$"):
        BadData(strict=True).add(BadConversation("unknown role", "'tool'; use user"), Place("dir/a.jsonl", 3))


@pytest.mark.parametrize("name", ["none.jsonl", "dir/none.json", "/none/none", "."])
def test_missing_files_are_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"^{name}: .*(cannot be read|can be loaded)") as caught:
        open_source(name)
    assert "\n" not in str(caught.value)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local data set of one split."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "train.jsonl").write_text(f'{GIVEN}\n{{"messages": []}}\n{GIVEN}\n')
    return tmp_path / "chats"


def test_data_sets_are_read_as_files_are(folder: Path) -> None:
    for name in (str(folder), f"{folder}:train"):
        source = open_source(name)
        assert isinstance(source, DatasetSource)
        found = [(entry.place, outcome(entry)) for entry in source]
        assert found == [(Place(name, 1), CHAT), (Place(name, 2), "empty conversation"), (Place(name, 3), CHAT)]


def test_a_data_set_of_several_splits_needs_one(folder: Path) -> None:
    (folder / "test.jsonl").write_text(f"{GIVEN}\n")
    assert [outcome(entry) for entry in open_source(f"{folder}:test")] == [CHAT]
    with pytest.raises(ValueError, match=r"several splits; give .*chats:SPLIT, of train, test$"):
        open_source(str(folder))
    with pytest.raises(ValueError, match=r'neither a file .*Unknown split "dev"'):
        open_source(f"{folder}:dev")


def test_names_of_data_sets_go_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(path: str, split: str) -> datasets.Dataset:
        asked.append((path, split))
        return datasets.Dataset.from_list([GOOD])

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = open_source("HuggingFaceH4/ultrachat_200k:train_sft")
    assert [(entry.place.line, outcome(entry)) for entry in source] == [(1, CHAT)]
    assert asked == [("HuggingFaceH4/ultrachat_200k", "train_sft")]


def test_the_library_for_data_sets_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"^owner/name: .*pip install 'specdec\[train\]'"):
        open_source("owner/name")


def test_digests_follow_the_content(tmp_path: Path, folder: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(GIVEN)
    before = open_source(file).digest(), open_source(str(folder)).digest()
    assert before == (open_source(file).digest(), open_source(str(folder)).digest())
    file.write_text(GIVEN + "\n")
    (folder / "train.jsonl").write_text(f"{GIVEN}\n")
    assert not set(before) & {open_source(file).digest(), open_source(str(folder)).digest()}
