"""Parts that need no cluster: the configuration file, and `--replicas` without the package."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.cli import serve as command

FOLDER = Path(__file__).parents[3] / "docker"


def test_without_the_package_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.kernels.types.extras.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"^--replicas 2 needs ray; run: pip install 'specdec\[ray\]'$"):
        command._replicated(2)


def test_one_engine_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.kernels.types.extras.find_spec", lambda _: None)
    assert command._replicated(1) is None
    with pytest.raises(ValueError, match=r"^--prefill-replicas 1 needs ray; run: pip install 'specdec\[ray\]'$"):
        command._replicated(1, 1)


@pytest.fixture
def build() -> Any:
    pytest.importorskip("ray", reason="the package ray is not installed: pip install 'specdec[ray]'")
    from specdec.ray_serve.application import build

    return build


@pytest.mark.parametrize("name", ["replicas.yaml", "prefill_decode.yaml"])
def test_the_configuration_files(build: Any, name: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    from specdec.ray_serve.application import FRONT
    from specdec.ray_serve.deployment import ENGINE, PREFILL

    content = yaml.safe_load((FOLDER / name).read_text())
    (application,) = ServeDeploySchema(**content).applications
    assert application.import_path == f"{build.__module__}:{build.__name__}"
    assert {each.name for each in application.deployments} == {
        FRONT,
        ENGINE,
        *([PREFILL] if name == "prefill_decode.yaml" else []),
    }
    front = build(application.args)._bound_deployment
    assert front.name == FRONT
    bound = {each._bound_deployment.name: each._bound_deployment for each in front.init_args[:2] if each is not None}
    assert {FRONT, *bound} == {each.name for each in application.deployments}
    if PREFILL in bound:
        assert [bound[each].init_args[2]["role"] for each in (ENGINE, PREFILL)] == ["decode", "prefill"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"modell": "x"}, "args has no 'modell'; the nearest it has is 'model'"),
        ({"server": {"api_keys": ["x"]}}, "ServerSettings has no 'api_keys'; the nearest it has is 'api_key'"),
        ({"server": {"max_logprobs": -1}}, "max_logprobs is -1"),
        ({"server": {"allow_runtime_lora_updating": True, "admin_api_key": ["k"]}}, "name all in lora_modules"),
    ],
)
def test_arguments_that_are_refused(build: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(arguments)


@pytest.mark.usefixtures("build")
def test_more_replicas_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec.ray_serve import deployment

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(deployment.ray, "init", lambda *_, **__: None)
    monkeypatch.setattr(deployment.ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 1.0})
    replicas = deployment.OwnReplicas(2, True, None, "none", {}, 300.0)
    with pytest.raises(ValueError, match=r"^2 replicas need as many GPUs; this machine has 1; give fewer$"):
        asyncio.run(replicas.start())


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "Deploying failed:\nTraceback\n  x\nValueError: kv_cache_memory is 1; give more\n\nmore",
            "ValueError: kv_cache_memory is 1; give more",
        ),
        ("no traceback", "no traceback"),
    ],
)
@pytest.mark.usefixtures("build")
def test_the_cause_is_one_line(text: str, cause: str) -> None:
    from specdec.ray_serve.deployment import _cause

    assert _cause(RuntimeError(text)) == cause
