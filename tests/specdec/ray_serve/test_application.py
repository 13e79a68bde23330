"""What needs no cluster: the configuration file, and `--replicas` without the package."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.cli import serve as command

FILE = Path(__file__).parents[3] / "docker" / "replicas.yaml"


def test_without_the_package_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"^--replicas 2 needs ray; run: pip install 'specdec\[ray\]'$"):
        command._replicated(2)


def test_one_engine_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda _: None)
    assert command._replicated(1) is None


@pytest.fixture
def build() -> Any:
    pytest.importorskip("ray", reason="the package ray is not installed: pip install 'specdec[ray]'")
    from specdec.ray_serve.application import build

    return build


def test_the_configuration_file(build: Any) -> None:
    from ray.serve.schema import ServeDeploySchema

    from specdec.ray_serve.application import FRONT
    from specdec.ray_serve.deployment import ENGINE

    content = yaml.safe_load(FILE.read_text())
    (application,) = ServeDeploySchema(**content).applications
    assert application.import_path == f"{build.__module__}:{build.__name__}"
    assert {each.name for each in application.deployments} == {FRONT, ENGINE}
    assert build(application.args)._bound_deployment.name == FRONT


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"modell": "x"}, "args has no 'modell'; the nearest it has is 'model'"),
        ({"server": {"api_keys": ["x"]}}, "server has no 'api_keys'; the nearest it has is 'api_key'"),
        ({"server": {"max_logprobs": -1}}, "max_logprobs is -1"),
    ],
)
def test_arguments_that_are_refused(build: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(arguments)
