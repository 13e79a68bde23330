"""Models by name on the hub: what is downloaded, from where it is read, and what an error says."""

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from specdec import LLM, AsyncLLM, SamplingParams
from specdec.cli.app import main
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.models.hub import checkpoint_path, shown_name
from specdec.train_eagle.data.prepared_data import PreparedData
from specdec.train_eagle.program import main as program
from specdec.train_eagle.training.head_export import from_folder
from tests.fakes import edit_json
from tests.specdec.hub_stand_in import GATED, HubStandIn, hub_stand_in
from tests.specdec.tiny_checkpoints import Tiny

pytestmark = pytest.mark.slow

TARGET, HEAD = "org/target", "org/head"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    """A hub that is reached, an empty cache, and an empty working folder."""
    with hub_stand_in() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        (tmp_path / "work").mkdir()
        monkeypatch.chdir(tmp_path / "work")
        yield served


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.mark.long
def test_model_and_head_are_downloaded_once_and_without_pickles_or_code(
    hub: HubStandIn, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = tmp_path / "offered"
    shutil.copytree(tiny.target, offered)
    for name in ("modeling_own.py", "pytorch_model.bin", "training_args.bin", "consolidated.safetensors"):
        (offered / name).write_bytes(b"never read")
    (offered / "additional_chat_templates").mkdir()
    (offered / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    (offered / "onnx").mkdir()
    shutil.copy(tiny.target / "model.safetensors", offered / "onnx" / "model.safetensors")
    hub.add(TARGET, offered)
    hub.add(HEAD, tiny.head)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def answer(model: str | Path, draft: str | Path) -> list[int]:
        llm = LLM(model, draft=draft, dtype="float64", device="cpu")
        assert shown_name(llm.config.model) == (TARGET if isinstance(model, str) else "target")
        return list(llm.generate("hello", params)[0].outputs[0].token_ids)

    expected = answer(tiny.target, tiny.head)
    assert answer(TARGET, HEAD) == expected
    wanted = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    wanted |= {"additional_chat_templates/tool_use.jinja"}
    jinja = {"chat_template.jinja"} if (tiny.target / "chat_template.jinja").is_file() else set()
    heads = {f"{HEAD}/config.json", f"{HEAD}/model.safetensors"}
    assert set(hub.sent) == {f"{TARGET}/{name}" for name in wanted | jinja} | heads
    assert len(hub.sent) == len(set(hub.sent))
    # What the cache holds is not asked for again, online or offline.
    hub.models.clear()
    hub.sent.clear()
    go_offline(monkeypatch)
    assert answer(TARGET, HEAD) == expected
    assert shown_name(AsyncLLM(TARGET, HEAD).config.model) == TARGET
    assert not hub.sent


def test_only_the_shards_of_the_index_are_downloaded(hub: HubStandIn, tiny: Tiny, tmp_path: Path) -> None:
    offered = tmp_path / "offered"
    shutil.copytree(tiny.target, offered)
    tensors = list(load_file(tiny.target / "model.safetensors").items())
    (offered / "model.safetensors").unlink()
    shards = {"model-1-of-2.safetensors": dict(tensors[:4]), "model-2-of-2.safetensors": dict(tensors[4:])}
    for name, part in shards.items():
        save_file(part, offered / name)
    named = {"weight_map": {tensor: name for name, part in shards.items() for tensor in part}}
    (offered / "model.safetensors.index.json").write_text(json.dumps(named))
    (offered / "other.safetensors").write_bytes(b"never read")
    hub.add(TARGET, offered)
    folder = checkpoint_path(TARGET)
    assert {file.name for file in folder.glob("*.safetensors")} == set(shards)


@pytest.mark.long
def test_a_revision_is_one_of_the_hub(hub: HubStandIn, tiny: Tiny) -> None:
    hub.add(TARGET, tiny.bare)
    commit = hub.add(TARGET, tiny.target, "v2")
    assert not (checkpoint_path(TARGET) / "tokenizer.json").exists()
    for revision in ("v2", commit):
        folder = checkpoint_path(TARGET, revision)
        assert (folder / "tokenizer.json").exists()
        assert folder.name == commit
    options = ["--revision", "v2", "--draft", "ngram", "--compare", "--max-tokens", "2", "--dtype", "float64"]
    with pytest.raises(SystemExit) as exited:
        main(["generate", "hello", "--model", TARGET, *options])
    assert exited.value.code == 0
    with pytest.raises(CheckpointError, match="org/target: no revision 'v3' on the hub; name a branch"):
        LLM(TARGET, revision="v3")


def test_a_local_folder_of_the_same_name_wins(hub: HubStandIn, tiny: Tiny) -> None:
    hub.add(TARGET, tiny.target)
    shutil.copytree(tiny.bare, TARGET)
    assert checkpoint_path(TARGET) == Path(TARGET)
    assert not hub.sent
    with pytest.raises(CheckpointError, match="revision is 'v2', but org/target is a local path; leave"):
        checkpoint_path(TARGET, "v2")


def test_the_target_that_a_head_names_is_downloaded(hub: HubStandIn, tiny: Tiny, tmp_path: Path) -> None:
    head = tmp_path / "head"
    shutil.copytree(tiny.head, head)
    layer = json.loads((head / "config.json").read_text())
    named = {"speculators_model_type": "eagle", "speculators_config": {"verifier": {"name_or_path": TARGET}}}
    edit_json(head / "config.json", transformer_layer_config=layer, **named)
    hub.add(TARGET, tiny.target)
    hub.add(HEAD, head)
    llm = LLM(draft=HEAD, dtype="float64", device="cpu")
    assert shown_name(llm.config.model) == TARGET
    assert llm.engine.worker.runner.head is not None


def test_inspect_needs_the_config_of_the_target_alone(
    hub: HubStandIn, tiny: Tiny, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPECDEC_MODEL", raising=False)
    hub.add(TARGET, tiny.target)
    hub.add(HEAD, tiny.head)
    with pytest.raises(SystemExit) as exited:
        main(["inspect", HEAD, "--model", TARGET])
    assert exited.value.code == 0
    assert f"{TARGET}: fits" in capsys.readouterr().out
    assert f"{TARGET}/model.safetensors" not in hub.sent
    # What it left in the cache is no whole model yet.
    assert (checkpoint_path(TARGET) / "model.safetensors").is_file()


@pytest.mark.long
def test_training_takes_names_too(hub: HubStandIn, tiny: Tiny, tmp_path: Path) -> None:
    hub.add(TARGET, tiny.target)
    hub.add(HEAD, tiny.head)
    data = tmp_path / "data.jsonl"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    data.write_text(json.dumps({"messages": messages}) + "\n")
    with pytest.raises(SystemExit) as exited:
        program(["prepare", "--model", TARGET, "--data", str(data), "--out", str(tmp_path / "prepared")])
    assert exited.value.code == 0
    prepared = PreparedData(tmp_path / "prepared")
    assert prepared.complete
    assert prepared.settings["model"] == TARGET
    assert from_folder(checkpoint_path(HEAD), Path(TARGET)).target == TARGET


def test_the_token_is_sent(hub: HubStandIn, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    hub.add(TARGET, tiny.bare)
    checkpoint_path(TARGET)
    assert hub.tokens == {"Bearer hf_of_a_test"}


def test_each_failure_is_one_line_with_a_remedy(
    hub: HubStandIn, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pickled = tmp_path / "pickled"
    shutil.copytree(tiny.target, pickled)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    hub.add("org/pickled", pickled)
    hub.add("org/data", tmp_path / "work")
    (tmp_path / "work" / "README.md").write_text("no model")
    expected = {
        "org/absent": r"no such folder, and no such model on the hub; a private one needs: hf auth login",
        GATED: r"gated on the hub; ask for access on its page, and run: hf auth login",
        "org/pickled": r"no \*\.safetensors on the hub, and pickles are never downloaded; .* hf download org/pickled",
        "org/data": r"no config.json on the hub; a GGUF file there is fetched by: hf download org/data FILE.gguf",
    }
    for name, message in expected.items():
        with pytest.raises(CheckpointError, match=f"^{name}: {message}") as raised:
            checkpoint_path(name)
        assert "\n" not in str(raised.value)
    # Other names than those of the hub are paths.
    word = "folder; a model on the hub has a name like org/name"
    for path, what in {"path/to/model": "folder", "folder/model.gguf": "file", "model": word}.items():
        with pytest.raises(CheckpointError, match=f"^{path}: no such {what}$"):
            checkpoint_path(path)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(CheckpointError, match=r"^org/m: .*cannot be downloaded \(.*\); .* run: hf download org/m$"):
            checkpoint_path("org/m")
    go_offline(monkeypatch)
    offline = r"not in the hub's cache, and HF_HUB_OFFLINE is set; run: hf download org/m --revision v2$"
    with pytest.raises(CheckpointError, match=offline):
        checkpoint_path("org/m", "v2")
