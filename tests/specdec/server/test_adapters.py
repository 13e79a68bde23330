"""Adapters chosen by the model's name, loaded and unloaded while the server runs."""

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import NotFoundError, OpenAI
from transformers import LlamaForCausalLM

from specdec import LoRARequest, SamplingParams
from specdec.async_engine.errors import EngineDeadError
from specdec.cli.app import main
from specdec.core.errors import QueueFullError
from specdec.server.lora_modules import read_lora_modules
from specdec.server.server_settings import ServerSettings
from tests.lora_adapters import save_adapter, save_draft_adapter
from tests.specdec.server.running import Served
from tests.specdec.tiny_checkpoints import Tiny

pytestmark = pytest.mark.slow

PROMPT = "a restaurant in"
KEY = {"Authorization": "Bearer k"}


@pytest.fixture(scope="module")
def adapters(folders: Tiny, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three adapters, for an engine with room for two."""
    target = LlamaForCausalLM.from_pretrained(folders.target, dtype="float64")
    root = tmp_path_factory.mktemp("adapters")
    return [
        save_adapter(root / name, target, seed=seed, size=0.5) for seed, name in enumerate(("taxis", "trains", "food"))
    ]


@pytest.fixture(scope="module")
def served(engine: Served, adapters: list[Path]) -> Iterator[Served]:
    """A server that begins with one adapter, and lets clients with the key change them."""
    given = [json.dumps({"name": "taxis", "path": str(adapters[0]), "base_model_name": "tiny"})]
    with engine.again(lora_modules=given, allow_runtime_lora_updating=True, admin_api_key=["k"]) as server:
        yield server


def expected(served: Served, adapter: Path | None, number: int, prompt: str = PROMPT) -> str:
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    request = None if adapter is None else LoRARequest(adapter.name, number, str(adapter))
    return served.offline.generate(prompt, params, lora_request=request, use_tqdm=False)[0].outputs[0].text


def complete(client: OpenAI, model: str, **settings: Any) -> Any:
    extra = {"ignore_eos": True}
    return client.completions.create(
        model=model, prompt=PROMPT, max_tokens=16, temperature=0, extra_body=extra, **settings
    )


@pytest.mark.long
def test_requests_choose_an_adapter_by_the_models_name(served: Served, adapters: list[Path]) -> None:
    with OpenAI(base_url=f"{served.url}/v1", api_key="k", max_retries=0) as client:
        cards = {card.id: card.model_dump() for card in client.models.list()}
        assert list(cards) == ["tiny", "taxis"]
        assert (cards["taxis"]["root"], cards["taxis"]["parent"]) == (str(adapters[0]), "tiny")
        assert client.models.retrieve("taxis").id == "taxis"
        plain, adapted = complete(client, "tiny"), complete(client, "taxis")
        assert (plain.model, adapted.model) == ("tiny", "taxis")
        assert plain.choices[0].text == expected(served, None, 0)
        assert adapted.choices[0].text == expected(served, adapters[0], 1) != plain.choices[0].text
        parts = list(complete(client, "taxis", stream=True))
        assert "".join(part.choices[0].text for part in parts) == adapted.choices[0].text
        assert {part.model for part in parts} == {"taxis"}
        messages: Any = [{"role": "user", "content": "Hi"}]
        answers = [
            client.chat.completions.create(model=model, messages=messages, max_tokens=8, temperature=0)
            for model in ("tiny", "taxis")
        ]
        assert answers[1].model == "taxis"
        assert answers[0].choices[0].message.content != answers[1].choices[0].message.content
        reply = client.responses.create(model="taxis", input="Hi", max_output_tokens=8, temperature=0)
        assert reply.model == "taxis"
        assert reply.output_text == answers[1].choices[0].message.content
        with pytest.raises(NotFoundError, match="served is tiny, taxis"):
            complete(client, "trains")
    body = {"model": "taxis", "prompt": "a", "choices": ["b", "c"]}
    scores = [served.send("POST", "/v1/score_choices", {**body, "model": model}, KEY)[2] for model in ("tiny", "taxis")]
    assert [each["model"] for each in scores] == ["tiny", "taxis"]
    assert scores[0]["choices"][0]["cumulative_logprob"] != scores[1]["choices"][0]["cumulative_logprob"]


def change(served: Served, what: str, **body: Any) -> tuple[int, Any]:
    status, _, reply = served.send("POST", f"/v1/{what}_lora_adapter", body, KEY)
    return status, reply


@pytest.mark.long
def test_adapters_are_loaded_and_unloaded_while_requests_run(served: Served, adapters: list[Path]) -> None:
    long = {"model": "taxis", "prompt": PROMPT, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    text = served.send("POST", "/v1/completions", long, KEY)[2]["choices"][0]["text"]
    found: list[Any] = []
    before = served.call(served.llm.stats()).queued
    thread = threading.Thread(
        target=lambda: found.append(served.send("POST", "/v1/completions", long, KEY)[2]["choices"][0]["text"])
    )
    thread.start()
    while served.call(served.llm.stats()).queued == before:
        pass
    assert change(served, "load", lora_name="trains", lora_path=str(adapters[1]))[0] == 200
    assert change(served, "unload", lora_name="taxis")[0] == 200
    # Unloaded, it keeps its place while the request has it.
    status, reply = change(served, "load", lora_name="food", lora_path=str(adapters[2]))
    if status != 200:
        assert (status, reply["error"]["code"]) == (503, "queue_full")
    thread.join()
    assert found == [text]
    with OpenAI(base_url=f"{served.url}/v1", api_key="k", max_retries=0) as client:
        if status != 200:
            assert change(served, "load", lora_name="food", lora_path=str(adapters[2]))[0] == 200
        with pytest.raises(NotFoundError):
            complete(client, "taxis")
        assert complete(client, "trains").choices[0].text == expected(served, adapters[1], 2)
        assert complete(client, "food").choices[0].text == expected(served, adapters[2], 3)
        # Another folder under the same name.
        status, _ = change(served, "load", lora_name="food", lora_path=str(adapters[0]), load_inplace=True)
        assert status == 200
        assert complete(client, "food").choices[0].text == expected(served, adapters[0], 1)
        assert [card.id for card in client.models.list()] == ["tiny", "trains", "food"]
    for name in ("trains", "food"):
        assert change(served, "unload", lora_name=name)[0] == 200
    assert change(served, "load", lora_name="taxis", lora_path=str(adapters[0]))[0] == 200
    served.wait_until_idle()


@pytest.mark.parametrize(
    ("error", "code"),
    [(EngineDeadError("it starts again"), "engine_dead"), (QueueFullError("a replica did not answer"), "queue_full")],
)
def test_an_adapter_that_could_not_be_unloaded_is_still_served(
    served: Served, adapters: list[Path], monkeypatch: pytest.MonkeyPatch, error: Exception, code: str
) -> None:
    """So that a client that tries again, as it is told to, finds it."""

    async def fails(_: int) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(served.llm, "remove_lora", fails)
        status, reply = change(served, "unload", lora_name="taxis")
    assert (status, reply["error"]["code"], reply["error"]["message"]) == (503, code, str(error))
    assert change(served, "unload", lora_name="taxis")[0] == 200
    assert change(served, "load", lora_name="taxis", lora_path=str(adapters[0]))[0] == 200


@pytest.mark.long
def test_the_draft_model_may_be_adapted_too(
    served: Served, folders: Tiny, adapters: list[Path], tmp_path: Path
) -> None:
    """No text changes, and the metrics tell its trees apart."""
    draft = str(save_draft_adapter(tmp_path, folders.head, size=0.5))
    assert change(served, "unload", lora_name="taxis")[0] == 200
    for name, more in (("trains", {}), ("adapted", {"draft_lora_path": draft})):
        assert change(served, "load", lora_name=name, lora_path=str(adapters[1]), **more)[0] == 200
        with OpenAI(base_url=f"{served.url}/v1", api_key="k", max_retries=0) as client:
            assert complete(client, name).choices[0].text == expected(served, adapters[1], 2)
        assert change(served, "unload", lora_name=name)[0] == 200
    page = served.send("GET", "/metrics", None, KEY)[2].decode()
    counts = re.findall(r'specdec:adapter_drafts_total{.*draft_model="(\w+)".*lora_name="(trains|adapted)"', page)
    assert {("adapted", "adapted"), ("plain", "trains")} <= set(counts)
    assert change(served, "load", lora_name="taxis", lora_path=str(adapters[0]))[0] == 200


def test_invalid_adapters_are_refused(served: Served, folders: Tiny, adapters: list[Path]) -> None:
    path = str(adapters[1])
    for body, status, field in (
        ({"lora_name": "x", "lora_path": "nowhere"}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": str(folders.target)}, 400, "lora_path"),
        ({"lora_name": "tiny", "lora_path": path}, 400, "lora_name"),
        ({"lora_name": "", "lora_path": path}, 400, "lora_name"),
        ({"lora_name": "taxis", "lora_path": path}, 400, "lora_name"),
        ({"lora_name": "x"}, 400, "lora_path"),
    ):
        found, reply = change(served, "load", **body)
        assert (found, reply["error"]["param"]) == (status, field), body
    found, reply = change(served, "unload", lora_name="x")
    assert (found, reply["error"]["code"]) == (404, "model_not_found")
    assert served.send("POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": path})[0] == 401


def test_clients_change_adapters_only_where_that_is_allowed(server: Served, adapters: list[Path]) -> None:
    body = {"lora_name": "x", "lora_path": str(adapters[0])}
    for what in ("load", "unload"):
        status, _, reply = server.send("POST", f"/v1/{what}_lora_adapter", body)
        assert status == 403
        assert "--allow-runtime-lora-updating" in reply["error"]["message"]
    with pytest.raises(ValueError, match="allow_runtime_lora_updating needs an administrator's key"):
        ServerSettings(allow_runtime_lora_updating=True)


def test_modules_are_read_in_both_forms() -> None:
    given = ["a=x/y=z", '{"name": "b", "path": "c"}', '{"name": "d", "draft_lora_path": "e"}']
    assert read_lora_modules(given) == [("a", "x/y=z", None), ("b", "c", None), ("d", "", "e")]
    for given, message in (
        (["a"], "lora_modules holds 'a'; it must be NAME=FOLDER"),
        (["=x"], "it must be NAME=FOLDER"),
        (['{"name": "b"}'], "or JSON with name and path"),
        (['{"name": "b", "path": 3}'], "or JSON with name and path"),
        (['{"name": '], "not valid JSON"),
        (['{"nam": "b"}'], "lora_modules has no 'nam'; it has name, path"),
        (["a=x", "a=y"], "lora_modules names 'a' twice"),
    ):
        with pytest.raises(ValueError, match=message):
            ServerSettings(lora_modules=given)


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lora-modules", "a"], "lora_modules holds 'a'; it must be NAME=FOLDER"),
        (["--lora-modules", "a=b"], "--lora-modules needs --enable-lora; give both"),
        (["--lora-modules", "tiny=b", "--enable-lora", "--served-model-name", "tiny"], "an adapter is called 'tiny'"),
        (["--lora-modules", "a=nowhere", "--enable-lora"], "nowhere: no such folder"),
    ],
)
def test_mistakes_at_the_start_are_one_line(
    folders: Tiny, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", str(folders.target), "--draft", "none", "--dtype", "float32", "--port", "0", *options])
    assert caught.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error
