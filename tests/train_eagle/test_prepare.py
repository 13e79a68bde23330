"""Prepared data: the same whatever interrupts it, and an account of what was left out."""

import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec.models.tokenizer import load_pretrained
from specdec.train_eagle.data import prepared_data
from specdec.train_eagle.data.chat_mask import ChatMask, Message, Sample
from specdec.train_eagle.data.prepared_data import PreparedData
from tests import stages

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] + ' <end> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    names = ["<end>", "<user>", "<assistant>", "<unk>", *"abcdefgh"]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


def chat(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def line(question: str, answer: str) -> str:
    return json.dumps({"messages": chat(question, answer)})


GOOD = [chat("a b", " ".join("abcdefgh"[: 1 + i])) for i in range(8)]
# Every second line is bad.
LINES = [text for messages in GOOD for text in (json.dumps({"messages": messages}), "{")]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(LINES))
    return file


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_samples_are_the_conversations_in_order(model: Path, data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps([{"conversations": [{"from": "gpt", "value": "h"}]}]))
    prepared = stages.prepare(model, [data, other], tmp_path / "out", shard_size=3)
    chat = ChatMask(load_pretrained(model))
    want = [sample for messages in [*GOOD, [{"role": "assistant", "content": "h"}]] for sample in chat.encode(messages)]
    assert [Sample(list(found.token_ids), list(found.mask)) for found in prepared.load()] == want
    assert [len(shard) for shard in PreparedData(tmp_path / "out")] == [3, 3, 3]
    assert prepared.conversations == 9
    assert prepared.tokens == sum(len(sample.token_ids) for sample in want)
    assert prepared.assistant_tokens == sum(sum(sample.mask) for sample in want)


def test_answers_of_one_conversation_are_known_as_such(model: Path, tmp_path: Path) -> None:
    """They are told apart from the next conversation, also where its first answers cannot be trained on."""
    tokenizer = load_pretrained(model)
    # All but the last answer are left out, so that each is a sample of its own.
    tokenizer.chat_template = TEMPLATE.replace(
        "m['content']", "('' if m['role'] == 'assistant' and not loop.last else m['content'])"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    long = [{"role": "user", "content": " ".join("a" * 40)}, *chat("a", "b")[1:]]
    given = [chat("a", "b"), chat("a", "b") + chat("c", "d") + chat("e", "f"), long, chat("a", "c") + chat("b", "d")]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in given))
    out = tmp_path / "out"
    prepared = stages.prepare(tmp_path / "model", [data], out, max_length=30, long="skip", shard_size=2)
    assert [sample.continues for sample in prepared.load()] == [False, False, True, True, False, True]


def test_files_on_disk(model: Path, data: Path, tmp_path: Path) -> None:
    prepared = stages.prepare(model, [data], tmp_path / "out", shard_size=5)
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert index["settings"]["model"] == model.name
    assert index["settings"]["max_length"] == 2048
    assert len(index["settings"]["inputs"]) == 64
    assert index["sources"] == [str(data)]
    assert (index["read"], index["conversations"], index["complete"]) == (16, 8, True)
    assert (index["tokens"], index["assistant_tokens"]) == (prepared.tokens, prepared.assistant_tokens)
    assert index["bad"]["counts"] == {"malformed JSON": 8}
    assert index["bad"]["first"] == {"malformed JSON": [f"{data}:{n}" for n in (2, 4, 6)]}
    assert [shard["conversations"] for shard in index["shards"]] == [5, 3]
    tensors = load_file(tmp_path / "out" / index["shards"][0]["file"])
    assert {name: str(tensor.dtype) for name, tensor in tensors.items()} == {
        "tokens": "torch.int32",
        "mask": "torch.bool",
        "lengths": "torch.int32",
        "continues": "torch.bool",
    }
    assert len(tensors["tokens"]) == len(tensors["mask"]) == tensors["lengths"].sum()


@pytest.mark.long
@given(st.integers(1, 5), st.lists(st.integers(0, 8), max_size=4), st.booleans())
def test_interruptions_lose_nothing(
    model: Path, tmp_path_factory: pytest.TempPathFactory, shard_size: int, deaths: list[int], before: bool
) -> None:
    """Killed at any write, before or after the file has its name, and given again, the command ends the same."""
    folder = tmp_path_factory.mktemp("runs")
    data = folder / "data.jsonl"
    data.write_text("\n".join(LINES))
    stages.prepare(model, [data], folder / "whole", shard_size=shard_size)
    replace = prepared_data.write_whole

    def dying(write_number: int) -> Callable[..., None]:
        left = write_number

        def die(file: Path, write: Callable[[Path], Any]) -> None:
            nonlocal left
            left -= 1
            if left < 0 and before:
                write(file.with_name(f"{file.name}.tmp"))
                raise KeyboardInterrupt
            replace(file, write)
            if left < 0:
                raise KeyboardInterrupt

        return die

    for death in deaths:
        with pytest.MonkeyPatch.context() as patch:
            die = dying(death)
            patch.setattr(prepared_data, "write_whole", die)
            try:
                stages.prepare(model, [data], folder / "cut", shard_size=shard_size)
            except KeyboardInterrupt:
                if (folder / "cut" / "index.json").exists() and not PreparedData(folder / "cut").complete:
                    with pytest.raises(ValueError, match="not all is prepared"):
                        PreparedData(folder / "cut").load()
    stages.prepare(model, [data], folder / "cut", shard_size=shard_size)
    left = {name: content for name, content in files(folder / "cut").items() if not name.endswith(".tmp")}
    assert left == files(folder / "whole")


@pytest.mark.parametrize("writer", ["save_file", "json"])
def test_a_file_that_is_half_written_never_has_its_name(
    writer: str, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = stages.prepare(model, [data], tmp_path / "out")
    before = files(tmp_path / "out")

    def half(_: object, file: Path, **__: object) -> None:
        file.write_bytes(b"{")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if writer == "json":
            patch.setattr(Path, "write_text", lambda file, text, **_: half(text, file))
        else:
            patch.setattr(prepared_data, "save_file", half)
        with pytest.raises(KeyboardInterrupt):
            prepared.add([Sample([1], [True])])
    assert before.items() <= files(tmp_path / "out").items()
    assert not (tmp_path / "out" / "samples-00001.safetensors").exists() or writer == "json"


def test_a_run_goes_on_behind_its_last_full_shard(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[Message]] = []
    real = ChatMask.encode

    def watched(self: ChatMask, messages: list[Message]) -> list[Sample]:
        seen.append(messages)
        if len(seen) == 6:
            raise KeyboardInterrupt
        return real(self, messages)

    monkeypatch.setattr(ChatMask, "encode", watched)
    with pytest.raises(KeyboardInterrupt):
        stages.prepare(model, [data], tmp_path / "out", shard_size=2)
    assert stages.prepare(model, [data], tmp_path / "out", shard_size=2).conversations == 8
    assert seen == [*GOOD[:6], *GOOD[4:]]
    stages.prepare(model, [data], tmp_path / "out", shard_size=2)
    assert len(seen) == 6 + 4, "nothing is left to do"


@pytest.mark.long
def test_several_processes_write_the_same(model: Path, data: Path, tmp_path: Path) -> None:
    for count in (1, 2):
        stages.prepare(model, [data, data], tmp_path / str(count), shard_size=7, processes=count)
    assert files(tmp_path / "1") == files(tmp_path / "2")


@pytest.mark.parametrize(
    ("setting", "changed"), [("max_length", {"max_length": 7}), ("long", {"long": "skip"}), ("limit", {"limit": 4})]
)
def test_other_settings_are_refused(
    setting: str, changed: dict[str, Any], model: Path, data: Path, tmp_path: Path
) -> None:
    stages.prepare(model, [data], tmp_path / "out")
    before = files(tmp_path / "out")
    with pytest.raises(ValueError, match=rf"out: made with {setting} \S+, not \S+; remove it or give another folder$"):
        stages.prepare(model, [data], tmp_path / "out", **changed)
    assert files(tmp_path / "out") == before


def test_other_inputs_and_templates_are_refused(model: Path, data: Path, tmp_path: Path) -> None:
    stages.prepare(model, [data], tmp_path / "out")
    data.write_text(data.read_text() + "\n" + LINES[0])
    with pytest.raises(ValueError, match="made with inputs"):
        stages.prepare(model, [data], tmp_path / "out")
    stages.prepare(model, [data], tmp_path / "other")
    tokenizer = load_pretrained(model)
    tokenizer.chat_template = TEMPLATE + "x"
    tokenizer.save_pretrained(tmp_path / model.name)
    with pytest.raises(ValueError, match="made with tokenizer"):
        stages.prepare(tmp_path / model.name, [data], tmp_path / "other")


def test_settings_may_change_while_there_is_no_shard(model: Path, data: Path, tmp_path: Path) -> None:
    """So that a line that strict refused can be mended."""
    with pytest.raises(ValueError, match=r"data\.jsonl, line 2: malformed JSON: .* column 1$"):
        stages.prepare(model, [data], tmp_path / "out", strict=True)
    data.write_text("\n".join(LINES[::2]))
    assert stages.prepare(model, [data], tmp_path / "out", strict=True).conversations == 8


def test_strict_does_not_go_on_over_bad_data(model: Path, data: Path, tmp_path: Path) -> None:
    stages.prepare(model, [data], tmp_path / "out")
    with pytest.raises(ValueError, match="holds data prepared without strict"):
        stages.prepare(model, [data], tmp_path / "out", strict=True)


def test_thinking_beside_the_answer_is_rendered_or_counted(model: Path, tmp_path: Path) -> None:
    """A template that reads it, and one that does not; rows with tools are counted by both."""
    thinking = chat("a", "b")
    thinking[1]["reasoning_content"] = "c d"
    data = tmp_path / "data.jsonl"
    tools = {"messages": chat("a", "b"), "tools": [{"type": "function"}]}
    data.write_text("\n".join([line("a", "b"), json.dumps({"messages": thinking}), json.dumps(tools)]))
    tokenizer = load_pretrained(model)
    reads = "{% if m.reasoning_content is defined %}{{ m.reasoning_content + ' <unk> ' }}{% endif %}"
    found = []
    for name, template in (
        ("deaf", TEMPLATE),
        ("reads", TEMPLATE.replace("m['content']", f"'' }}}}{reads}{{{{ m['content']")),
    ):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / name)
        prepared = stages.prepare(tmp_path / name, [data], tmp_path / f"{name} data")
        texts = [tokenizer.decode(sample.token_ids) for sample in prepared.load()]
        found.append((texts, dict(prepared.bad.counts)))
    plain = "<user> a <end> <assistant> b <end>"
    assert found == [
        ([plain], {"thinking left out by the chat template": 1, "tools": 1}),
        ([plain, plain.replace("b", "c d <unk> b")], {"tools": 1}),
    ]


def test_each_answer_may_be_a_sample(model: Path, tmp_path: Path) -> None:
    """A shard has all samples of its last entry, so that a run goes on behind it; one that is too long is counted."""
    tokenizer = load_pretrained(model)
    tokenizer.chat_template = TEMPLATE.replace(
        "m['content']", "('h' if m['role'] == 'assistant' and not loop.last else m['content'])"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    data = tmp_path / "data.jsonl"
    data.write_text((json.dumps({"messages": chat("a", "b") + chat("a", "c")}) + "\n") * 2)
    prepared = stages.prepare(tmp_path / "model", [data], tmp_path / "out", shard_size=1)
    assert [[tokenizer.decode(sample.token_ids) for sample in shard] for shard in prepared] == [
        ["<user> a <end> <assistant> b <end>", "<user> a <end> <assistant> h <end> <user> a <end> <assistant> c <end>"]
    ] * 2
    assert (prepared.read, prepared.conversations) == (2, 4)
    short = stages.prepare(tmp_path / "model", [data], tmp_path / "short", max_length=6, long="skip")
    assert (short.conversations, short.bad.counts) == (2, {"too long, left out": 2})


# <user> a a a a <end> <assistant> …: the seventh token is the first of the answer.
LONG = [line("a a a a", "b c d"), line("a", "b"), line("a a a a a a a", "b")]


@pytest.fixture
def long_data(tmp_path: Path) -> Path:
    file = tmp_path / "long.jsonl"
    file.write_text("\n".join(LONG))
    return file


def test_loaded_data_takes_the_memory_that_it_has_on_disk(tmp_path: Path) -> None:
    """5 bytes a token; numbers of Python took 53, in every process."""
    prepared = PreparedData.begin(tmp_path, {"format": 1}, ["made up"])
    prepared.complete = True
    prepared.add([Sample(range(1000, 3000), [i > 1000 for i in range(2000)]) for _ in range(20)])
    tracemalloc.start()
    loaded = prepared.load()
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken < 6 * sum(len(sample.token_ids) for sample in loaded)


def test_long_conversations_are_cut(model: Path, long_data: Path, tmp_path: Path) -> None:
    prepared = stages.prepare(model, [long_data], tmp_path / "out", max_length=8)
    assert [len(sample.token_ids) for sample in prepared.load()] == [8, 6]
    assert [sum(sample.mask) for sample in prepared.load()] == [1, 2]
    assert prepared.bad.counts == {"too long, cut": 1, "too long, no token of the assistant left": 1}
    assert prepared.bad.first["too long, cut"] == [f"{long_data}:1"]


def test_long_conversations_are_left_out(model: Path, long_data: Path, tmp_path: Path) -> None:
    prepared = stages.prepare(model, [long_data], tmp_path / "out", max_length=8, long="skip")
    assert [len(sample.token_ids) for sample in prepared.load()] == [6]
    assert prepared.bad.counts == {"too long, left out": 2}


def test_long_conversations_are_refused(model: Path, long_data: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"long\.jsonl, line 1: too long, cut: 11 tokens, more than max_length 8; raise"
    ):
        stages.prepare(model, [long_data], tmp_path / "out", max_length=8, strict=True)
    assert stages.prepare(model, [long_data], tmp_path / "out", max_length=12, strict=True).conversations == 3


ENTRIES = {
    "": line("a", "b"),
    "malformed JSON": "{",
    "not a JSON object": "[]",
    "empty conversation": '{"messages": []}',
    "unknown role": line("a", "b").replace("user", "tool"),
    "no assistant turn": line("a", "b").replace("assistant", "user"),
    "content is no string": line("a", "b").replace('"b"', "null"),
    "empty content": line("a", ""),
    "content is no UTF-8 text": line("a", "\ud800"),
    "refused by the chat template": line("a", "refuse me"),
    "turns rewritten by the chat template": line("rewrite me", "b"),
    "no token of the assistant": line("a", "say nothing"),
    "too long, no token of the assistant left": line("a " * 20, "b"),
    "too long, cut": line("a", "b " * 20),
}
FICKLE = (
    "{% for m in messages %}{% if m['content'] == 'refuse me' %}{{ raise_exception('I do') }}{% endif %}"
    "{{ '<' + m['role'] + '> ' }}{% if m['content'] != 'say nothing' %}"
    "{{ m['content'] + ' <end> ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<user> ' if messages[-1]['content'] == 'rewrite me' else '<assistant> ' }}{% endif %}"
)


@pytest.mark.long
@given(st.lists(st.sampled_from(list(ENTRIES))))
def test_every_entry_is_used_or_counted(
    model: Path, tmp_path_factory: pytest.TempPathFactory, reasons: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("mix")
    tokenizer = load_pretrained(model)
    tokenizer.chat_template = FICKLE
    tokenizer.save_pretrained(folder / "model")
    data = folder / "mix.jsonl"
    data.write_text("\n".join([ENTRIES[""], *(ENTRIES[reason] for reason in reasons)]))
    prepared = stages.prepare(folder / "model", [data], folder / "out", max_length=12, shard_size=3)
    assert prepared.bad.counts == {reason: reasons.count(reason) for reason in reasons if reason}
    assert prepared.read == len(reasons) + 1
    left_out = prepared.bad.counts.total() - prepared.bad.counts["too long, cut"]
    assert prepared.conversations == prepared.read - left_out


@pytest.mark.parametrize(
    ("content", "reason"), [("", "no entries"), ("{\n{\n1", r"2 malformed JSON \(\S*data.jsonl:1\)")]
)
def test_nothing_to_train_on_is_an_error(content: str, reason: str, model: Path, data: Path, tmp_path: Path) -> None:
    data.write_text(content)
    with pytest.raises(ValueError, match=rf"nothing to train on in \S*data.jsonl: {reason}"):
        stages.prepare(model, [data], tmp_path / "out")


def test_settings_that_make_no_sense(model: Path, data: Path, tmp_path: Path) -> None:
    for settings, message in (({"max_length": 1}, "at least 2"), ({"limit": 0}, "at least 1")):
        with pytest.raises(ValueError, match=message):
            stages.prepare(model, [data], tmp_path / "out", **settings)
    with pytest.raises(ValueError, match="none: no such folder"):
        stages.prepare(tmp_path / "none", [data], tmp_path / "out")
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        stages.prepare(tmp_path, [data], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"settings": {}, "sources": [], "shards": [{"a": 1}]}'])
def test_a_folder_without_an_index_is_named(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "index.json").write_text(content)
    with pytest.raises(ValueError, match=r"index\.json: (not an index of|no) prepared data"):
        PreparedData(tmp_path)


def run(model: Path, data: Path, out: Path, *more: str) -> None:
    stages.run("prepare", ["--model", model, "--data", data, "--out", out, *more])


def test_the_command_shows_what_is_trained(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(model, data, tmp_path / "out", "--preview", "2")
    shown = capsys.readouterr().out.split("\n")
    assert shown[1] == "<user> a b <end> <assistant>[[ a <end>]]"
    assert shown[3] == "<user> a b <end> <assistant>[[ a b <end>]]"
    assert shown[5].split() == ["malformed", "JSON", "8", f"{data}:2,", f"{data}:4,", f"{data}:6"]
    assert re.fullmatch(r"8 conversations, 84 tokens, 52% trained, in \S+out", shown[6])


def test_the_command_complains_in_one_line(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(model, data, tmp_path / "out", "--strict")
    assert caught.value.code == 2
    assert re.fullmatch(r"prepare: \S+data\.jsonl, line 2: malformed JSON: .*\n", capsys.readouterr().err)
